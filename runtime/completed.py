"""Completes plans with what options and artifact do not say: the model's key biases and the tokenizer's special tokens."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.runtime.key_projection import with_key_biases
from calib.runtime.special_tokens import with_special_tokens
from calib.runtime.store import Plan


def completed(
    plans: dict[int, Plan], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> dict[int, Plan]:
    """The plans of a model's layers, ready to check and open. Raises ValueError for what the model or the tokenizer lacks."""
    return with_key_biases(with_special_tokens(plans, tokenizer), model)
