"""Generates text after prompts of different length with a cache, until a stop text or an end-of-sequence token.

The whole prompt is prefilled, as `generate` does it: the first token is predicted from the exact prompt.
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

TAIL = 8  # last tokens of a prompt that are decoded together with the new ones


class Prompt(NamedTuple):
    """A prompt to continue.

    Attributes:
        context: token ids of the prompt, at least one.
        new: most new tokens.
        until: texts that end the generation.
        options: further arguments of `generate`.
    """

    context: list[int]
    new: int
    until: list[str]
    options: dict[str, Any]


def alone(tokenizer: PreTrainedTokenizerBase, context: list[int], ids: list[int]) -> str:
    """Decodes `ids` by themselves, without the prompt before them."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def behind(tokenizer: PreTrainedTokenizerBase, context: list[int], ids: list[int]) -> str:
    """Decodes `ids` as the continuation of `context`, exact to the character.

    Some decoders strip a space from the start of a text. A continuation must keep it, since it may be indentation.
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
    """Generates with `model.generate`, and returns each prompt's new text up to its first stop text.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        cache: an empty cache for the model.
        rows: the prompts, one batch; `new`, `until` and `options` of the first one are used for all.
        decode: `decode(tokenizer, ids of the prompt, new ids)` returns a row's text; lm-eval decodes as `alone` does.

    Raises RunError for token ids outside the model's vocabulary, and for NaN logits.
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
        end = next((at for at, token in enumerate(ids) if token in last), len(ids))  # the ids after it are padding
        texts.append(before(decode(tokenizer, row.context, ids[:end]), first.until))
    return texts


class NumbersOnly(LogitsProcessor):
    """Raises RunError for NaN logits, from which greedy decoding would silently choose a token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns `scores` [rows, vocabulary] unchanged."""
        if bool(scores.isnan().any()):
            raise RunError("the model's logits are NaN")
        return scores


class EndTexts(StoppingCriteria):
    """Stops a row when one of `texts` has been generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.texts, self.prompt = tokenizer, texts, prompt
        self.ended: set[int] = set()
        # A token has at least one byte. One token more is decoded, since some tokens' text depends on the token before them.
        self.tail = max((len(text.encode()) for text in texts), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """Returns bool [rows]: whether each row has generated a stop text."""
        new = input_ids[:, self.prompt :]
        for row, text in enumerate(self.tokenizer.batch_decode(new[:, -self.tail :])):
            if any(end in text for end in self.texts):
                self.ended.add(row)
        return torch.tensor([row in self.ended for row in range(len(new))], device=input_ids.device)


def before(text: str, ends: Sequence[str]) -> str:
    """Returns `text` up to the first occurrence of any of `ends`."""
    return text[: min((text.find(end) for end in ends if end in text), default=len(text))]


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token id that pads rows: the padding token, else the end token, else 0; the mask excludes it."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in found if token is not None)


def left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns left-padded ids and the mask of real tokens, int64 [rows, longest] each."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
