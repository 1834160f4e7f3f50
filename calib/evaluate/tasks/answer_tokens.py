"""Documents as token ids: prompts, and the text with the answers that follows them, in padded batches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from calib.documents.generators import Piece, RetrievalCase
from calib.errors import UsageError


class AnswerBatch(NamedTuple):
    """A batch of cases, all int64.

    Attributes:
        prompts: left-padded ids of the prompts [rows, tokens].
        mask: 1 for real tokens, 0 for padding [rows, tokens].
        answers: ids of the text after the prompts, answers and further questions [rows, most].
        asked: number (1, 2, ...) of the row's answer that a token belongs to, 0 for tokens that are not scored [rows, most].
    """

    prompts: Tensor
    mask: Tensor
    answers: Tensor
    asked: Tensor


class TokenRow(NamedTuple):
    """Ids of a prompt and of the text after it; `asked` as in `AnswerBatch`."""

    prompt: list[int]
    answers: list[int]
    asked: list[int]


def token_row(tokenizer: PreTrainedTokenizerBase, document: Sequence[Piece], special: bool = True) -> TokenRow:
    """Tokenise a document up to its last answer. A token that contains the end of an answer and more belongs to the answer.

    `special` says whether the tokenizer adds its special tokens; the text of a chat template contains its own.
    """
    positions = [position for position, piece in enumerate(document) if piece.is_answer]
    texts = ["".join(piece.text for piece in document[:position]) for position in range(len(document) + 1)]
    until = texts[positions[-1] + 1]
    prompt, rest = token_pair(tokenizer, RetrievalCase(texts[positions[0]], until[len(texts[positions[0]]) :]), special)
    whole, asked = prompt + rest, [0] * len(rest)
    for number, position in enumerate(positions, 1):
        before, after = (
            tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts[position : position + 2]
        )
        start = len(prompt) if number == 1 else shared(before, whole)
        same = shared(after, whole)
        end = same if same == len(after) else same + 1
        asked[start - len(prompt) : end - len(prompt)] = [number] * (end - start)
    return TokenRow(prompt, rest, asked)


def token_pair(
    tokenizer: PreTrainedTokenizerBase, case: RetrievalCase, special: bool = True
) -> tuple[list[int], list[int]]:
    """Returns the ids of the prompt and of the answer.

    The two are tokenised together and split at the first token that differs from those of the prompt alone: if a tokenizer joins
    the prompt's last space with the number, that token belongs to the answer. `special` as in `token_row`.
    """
    texts = (case.prompt, case.prompt + case.answer)
    alone, whole = (tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts)
    same = min(shared(alone, whole), len(whole) - 1)
    if same < 1:
        raise UsageError("this tokenizer leaves no prompt before the answer; use another model")
    return whole[:same], whole[same:]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix of two lists of ids."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def batch(
    pairs: Sequence[tuple[list[int], list[int]]],
    pad: int,
    device: torch.device,
    asked: Sequence[list[int]] | None = None,
) -> AnswerBatch:
    """Pads (prompt, answer) pairs to one batch. Shorter answers are padded with their last token, which is not scored.

    `asked` is as in `AnswerBatch`; without it all tokens after a prompt are one answer.
    """
    tokens, most = (max(map(len, part)) for part in zip(*pairs, strict=True))
    prompts = [[pad] * (tokens - len(prompt)) + prompt for prompt, _ in pairs]
    mask = [[0] * (tokens - len(prompt)) + [1] * len(prompt) for prompt, _ in pairs]
    answers = [answer + answer[-1:] * (most - len(answer)) for _, answer in pairs]
    numbers = asked if asked is not None else [[1] * len(answer) for _, answer in pairs]
    filled = [row + [0] * (most - len(row)) for row in numbers]
    return AnswerBatch(*(torch.tensor(part, device=device) for part in (prompts, mask, answers, filled)))
