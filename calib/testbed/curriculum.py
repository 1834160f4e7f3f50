"""What a pretraining step is made of: a pure function of (seed, step), so a run resumes exactly where it stopped.

A step is a batch of rows of one length. A phase of the curriculum tells rows x length, the share of rows that hold
language, and the share of the other rows that copy instead of looking up keyed lines. Short rows of easy documents
come first and language later: the attention pattern that copies (an induction head) forms within minutes on documents
alone, and hardly at all when language is mixed in from the first step.
"""

import random
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from calib.testbed.generators import Piece, Style, copying, keyed_lines, keyed_random
from calib.testbed.words import WORDS

IGNORED = -100  # the label that a cross entropy skips
TOKENS_PER_ITEM = 2  # of a copying document, about: a number is 2 to 5, a word 1 where it is a token of its own
LONGEST_NUMBER = 4


@dataclass(frozen=True)
class Phase:
    """A stretch of the curriculum.

    Attributes:
        share: of all steps; the phases' shares sum to 1.
        rows: rows in a batch.
        length: tokens in a row, `<s>` included.
        text: share of the rows that hold language; the loss is on all of it.
        copying: share of the remaining rows that copy; the others are keyed lines. The loss is on answers only.
    """

    share: float
    rows: int
    length: int
    text: float = 0.5
    copying: float = 0.0

    def __post_init__(self) -> None:
        for name in ("share", "text", "copying"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"phase {name}={getattr(self, name)}: a share lies between 0 and 1")
        if self.rows < 1:
            raise ValueError(f"phase rows={self.rows}: at least 1")


class Curriculum:
    """Batches by step.

    Args:
        phases: in order; their shares must sum to 1.
        steps: of the whole run.
        tokenizer: of the model.
        text: [tokens] uint16, the language as one stream of token ids.
        seed: of everything drawn.
    """

    def __init__(
        self, phases: list[Phase], steps: int, tokenizer: PreTrainedTokenizerFast, text: np.ndarray, seed: int
    ) -> None:
        total = sum(phase.share for phase in phases)
        if not phases or abs(total - 1) > 1e-6:
            raise ValueError(f"the phases' shares sum to {total:g}: they must sum to 1")
        longest = max((phase.length for phase in phases if phase.text), default=0)
        if len(text) < longest:
            raise ValueError(f"the text has {len(text)} tokens: a row of language needs {longest}; give more text")
        encodings = tokenizer.backend_tokenizer.encode_batch(
            [space + word for word in WORDS for space in ("", " ")], add_special_tokens=False
        )
        self.key_tokens = max(len(encoding.ids) for encoding in encodings)  # 1 for the tokenizer of a full vocabulary
        needed = 3 + 3 * self.line_tokens("line", LONGEST_NUMBER)
        for phase in phases:
            if phase.length < needed:
                raise ValueError(
                    f"phase length={phase.length}: two lines and a query need {needed} tokens with this tokenizer"
                )
        self.phases, self.steps, self.tokenizer, self.text, self.seed = phases, steps, tokenizer, text, seed
        self.ends = [round(float(end) * steps) for end in np.cumsum([phase.share for phase in phases])]

    def phase(self, step: int) -> Phase:
        """The phase that `step` lies in."""
        return next((phase for phase, end in zip(self.phases, self.ends, strict=True) if step < end), self.phases[-1])

    def batch(self, step: int) -> dict[str, Tensor]:
        """`input_ids` and `labels` [rows, length] int64 of a step; labels are -100 where nothing is to be predicted."""
        phase = self.phase(step)
        rng = keyed_random("pretrain", self.seed, step)
        language = round(phase.rows * phase.text)
        rows = [self.text_row(rng, phase.length) for _ in range(language)]
        copied = round((phase.rows - language) * phase.copying)
        documents = [self.copying_document(rng, phase.length) for _ in range(copied)]
        documents += [self.keyed_document(rng, phase.length) for _ in range(phase.rows - language - copied)]
        rows += document_rows(self.tokenizer, documents, phase.length)
        ids, labels = zip(*rows, strict=True)
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}

    def text_row(self, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """A window of the language behind `<s>`."""
        start = rng.randrange(len(self.text) - length + 2)
        ids = [self.tokenizer.bos_token_id, *self.text[start : start + length - 1].tolist()]
        return ids, ids

    def copying_document(self, rng: random.Random, length: int) -> list[Piece]:
        """A copying document that fills `length` tokens with at least one repetition begun."""
        items = rng.randint(2, max(2, length // (2 * TOKENS_PER_ITEM * self.key_tokens)))
        return list(copying(rng, items, repeats=length // items))

    def keyed_document(self, rng: random.Random, length: int) -> list[Piece]:
        """Keyed lines, then as many queries as `length` tokens hold; few lines or many, at least one query."""
        digits = rng.choice((1, 2, 4, 4))
        style: Style = "plain" if rng.random() < 0.6 else "line"
        room = (length - 3) // self.line_tokens(style, digits)  # `<s>`, `?`, line end
        lines = rng.randint(2, room - 1)
        return list(keyed_lines(rng, lines, queries=room - lines + 1, digits=digits, style=style))

    def line_tokens(self, style: Style, digits: int) -> int:
        """Tokens of a keyed line at most: word, space, digits, line end; in style "line" also `line` and `:`."""
        return self.key_tokens + digits + (2 if style == "plain" else 4)


def document_rows(
    tokenizer: PreTrainedTokenizerFast, documents: list[list[Piece]], length: int
) -> list[tuple[list[int], list[int]]]:
    """Ids and labels, exactly `length` each: cut at the end, or filled with `<pad>`. Labels stand on answers only.

    Pieces are tokenised on their own; their seams are always seams of the tokenizer (digits, line ends), so the ids
    are those of the whole text.
    """
    texts = [piece.text for piece in chain.from_iterable(documents)]
    encodings = iter(tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    rows = []
    for document in documents:
        ids, labels = [tokenizer.bos_token_id], [IGNORED]
        for piece in document:
            tokens = next(encodings).ids
            ids += tokens
            labels += tokens if piece.is_answer else [IGNORED] * len(tokens)
        missing = max(0, length - len(ids))
        rows.append((ids[:length] + [tokenizer.pad_token_id] * missing, labels[:length] + [IGNORED] * missing))
    return rows
