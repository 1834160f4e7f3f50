"""Text that a model generates behind prompts of different length, through a cache, until a stop text or its last token.

The whole prompt is prefilled, as a user's `generate` does: the first token is predicted from the exact prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

from calib.capture.device_map import check_token_ids
from calib.errors import RunError
from calib.runtime import cache_argument

TAIL = 8  # of a prompt's tokens, which tell a text's front from what goes on behind it


class Prompt(NamedTuple):
    """Ids of a prompt, at least one, to be gone on from for at most `new` tokens or until one of the texts `until`.

    options: further ones of `generate`.
    """

    context: list[int]
    new: int
    until: list[str]
    options: dict[str, Any]


def alone(tokenizer: PreTrainedTokenizerBase, context: list[int], ids: list[int]) -> str:
    """The text of `ids`, whatever stands before them."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def behind(tokenizer: PreTrainedTokenizerBase, context: list[int], ids: list[int]) -> str:
    """The text of `ids` behind `context`, to the character.

    Some decoders take a space off the front of a text; here that is in its middle, and may be indentation.
    """
    tail = context[-TAIL:]
    start, whole = (
        str(tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for part in (tail, tail + ids)
    )
    return whole[len(start) :] if whole.startswith(start) else alone(tokenizer, context, ids)


@torch.no_grad()
def generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache,
    rows: Sequence[Prompt],
    decode: Callable[[PreTrainedTokenizerBase, list[int], list[int]], str] = alone,
) -> list[str]:
    """What the model adds to each prompt before the first of its stop texts; settings are the first row's.

    decode: a row's text, `decode(tokenizer, ids of the prompt, new ids)`; `alone` is lm-eval's.

    Raises RunError for tokens that the model has not, and for logits that are NaN.
    """
    pad, first = pad_token(tokenizer), rows[0]
    tokens, mask = left_padded([row.context for row in rows], pad, model.device)
    check_token_ids(model, tokens)
    ends = EndTexts(tokenizer, first.until, tokens.shape[1])
    made = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=first.new,
        stopping_criteria=StoppingCriteriaList([ends]),
        logits_processor=LogitsProcessorList([NumbersOnly()]),
        pad_token_id=pad,
        **first.options,
        **{cache_argument.NAME: cache},
    )
    last = model.generation_config.eos_token_id
    last = {last} if isinstance(last, int) else set(last or ())
    texts = []
    for row, ids in zip(rows, made[:, tokens.shape[1] :].tolist(), strict=True):
        end = next((at for at, token in enumerate(ids) if token in last), len(ids))  # behind it the row was filled up
        texts.append(before(decode(tokenizer, row.context, ids[:end]), first.until))
    return texts


class NumbersOnly(LogitsProcessor):
    """Raises RunError for logits that are NaN, which greedy decoding would take for a token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[rows, vocabulary]: `scores` as they are."""
        if bool(scores.isnan().any()):
            raise RunError("the model's logits are NaN")
        return scores


class EndTexts(StoppingCriteria):
    """Ends a row when one of `texts` has been generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.texts, self.prompt = tokenizer, texts, prompt
        self.ended: set[int] = set()
        # A token holds at least one byte; one token more for those whose decoding depends on what stands before them.
        self.tail = max((len(text.encode()) for text in texts), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """[rows] bool: whether the row is at its end."""
        new = input_ids[:, self.prompt :]
        for row, text in enumerate(self.tokenizer.batch_decode(new[:, -self.tail :])):
            if any(end in text for end in self.texts):
                self.ended.add(row)
        return torch.tensor([row in self.ended for row in range(len(new))], device=input_ids.device)


def before(text: str, ends: Sequence[str]) -> str:
    """The text before the first of `ends` in it."""
    return text[: min((text.find(end) for end in ends if end in text), default=len(text))]


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What pads a row; nothing attends to it."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in found if token is not None)


def left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and the mask of real ones, [rows, longest] int64 each."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
