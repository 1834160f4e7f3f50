"""What plans cannot know by options and artifact alone: the model itself, and its tokenizer."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.runtime.key_projection import with_key_biases
from calib.runtime.special_tokens import with_special_tokens
from calib.runtime.store import Plan


def completed(
    plans: dict[int, Plan], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> dict[int, Plan]:
    """The plans of a model's layers, ready to be checked and opened; ValueError for what the model or the tokenizer lacks."""
    return with_key_biases(with_special_tokens(plans, tokenizer), model)
