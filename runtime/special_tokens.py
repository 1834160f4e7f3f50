"""The special and punctuation tokens of a tokenizer: ZipCache's probes of that name (arXiv:2405.14256, section 4.3)."""

import string
import unicodedata
import weakref

from transformers import PreTrainedTokenizerBase

from calib.runtime.messages.printable import printable
from calib.runtime.store import Plan

# For each tokenizer its size and the ids of its punctuation tokens: decoding a whole vocabulary takes a second.
_punctuation: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, frozenset[int]]]" = (
    weakref.WeakKeyDictionary()
)


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the ids of a tokenizer's special tokens and of its punctuation tokens, ascending.

    Special tokens are those that the tokenizer names, and added tokens marked as special, such as a chat's `<|im_start|>`. A
    punctuation token consists of one or more punctuation characters, apart from spaces around them: Unicode's category P, and
    the other characters of ASCII's punctuation (`$+<=>^`|~`). A line end is not punctuation.

    Raises ValueError for an argument that is not a tokenizer of transformers, and for a tokenizer without such tokens.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"tokenizer must be a tokenizer of transformers, got {printable(tokenizer)}; AutoTokenizer.from_pretrained(name) "
            "gives one"
        )
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    found = tuple(sorted({*tokenizer.all_special_ids, *added, *_punctuation_ids(tokenizer)}))
    if not found:
        raise ValueError(
            f"the tokenizer, {type(tokenizer).__name__} of {len(tokenizer)} tokens, has no special and no punctuation tokens; "
            "give their ids as special_ids, or use other probes"
        )
    return found


def with_special_tokens(plans: dict[int, Plan], tokenizer: PreTrainedTokenizerBase | None) -> dict[int, Plan]:
    """Returns the plans by layer; those that lack the ids of special tokens get the `tokenizer`'s, if one is given."""
    if tokenizer is None or not any(plan.lacks_special_ids for plan in plans.values()):
        return plans
    found = special_token_ids(tokenizer)
    return {layer: plan.with_special_ids(found) for layer, plan in plans.items()}


def _punctuation_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    size, found = _punctuation.get(tokenizer, (-1, frozenset()))
    if size != len(tokenizer):
        numbers = tokenizer.get_vocab().values()
        found = frozenset(number for number in numbers if _is_punctuation(tokenizer.decode([number])))
        _punctuation[tokenizer] = len(tokenizer), found
    return found


def _is_punctuation(text: str) -> bool:
    characters = text.strip()
    return bool(characters) and all(
        character in string.punctuation or unicodedata.category(character).startswith("P") for character in characters
    )
