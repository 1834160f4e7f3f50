"""The special and punctuation tokens of a tokenizer: ZipCache's probes of that name (arXiv:2405.14256, section 4.3)."""

import string
import unicodedata
import weakref

from transformers import PreTrainedTokenizerBase

from calib.runtime.messages.printable import printable
from calib.runtime.store import Plan

# Of each tokenizer its size and its punctuation: a vocabulary takes a second to spell.
_punctuation: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, frozenset[int]]]" = (
    weakref.WeakKeyDictionary()
)


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids of its special tokens (those that it names, and added ones that are marked as special, such as a chat's
    `<|im_start|>`) and of its punctuation tokens, rising.

    A punctuation token spells one or more punctuation characters, spaces around them apart, and nothing else: those of Unicode's
    category P, and the others of ASCII's (`$+<=>^`|~`). A line end is none.

    Raises ValueError for what is no tokenizer of transformers, and for one without such tokens.
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
    """The plans of layers; where one lacks the ids of special tokens, with those of the `tokenizer`, if there is one."""
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
