"""Batches of token sequences, and batches whose layer samples are computed when they are streamed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.capture import stream
from calib.capture.gradients import stream_gradients
from calib.capture.sample import Sink
from calib.capture.shard import WHOLE, Shard

GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples are evenly spread over [0, 1), however many there are


@dataclass(eq=False)  # not frozen: Lightning moves a copy of it to the device field by field
class TokenBatch:
    """A batch of token sequences.

    Attributes:
        tokens: int64 `[batch, length]`.
        mask: bool `[batch, length]`, True for real tokens.
        index: int64 `[batch, length]`, the tokens' numbers in the corpus.
        begins: int64 `[batch]`, the position of each sequence's first token.
    """

    tokens: Tensor
    mask: Tensor
    index: Tensor
    begins: Tensor


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """A batch and the model to run on it; `stream` computes one layer's sample at a time."""

    model: PreTrainedModel
    batch: TokenBatch

    def stream(self, sink: Sink) -> None:
        """Runs the model once and calls `sink` with each layer's sample as the forward pass reaches it; no-op if empty."""
        if len(self):
            batch = self.batch
            stream(self.model, batch.tokens, batch.mask, batch.index, sink, batch.begins)

    def stream_gradients(self, seed: int, sink: Sink) -> list[str]:
        """Differentiates the model and calls `sink` for each sequence and layer, as `calib.capture.gradients` does.

        Returns a reason for each sequence without derivatives.
        """
        if not len(self):
            return []
        batch = self.batch
        return stream_gradients(self.model, batch.tokens, batch.mask, batch.index, seed, sink, batch.begins)

    def __len__(self) -> int:
        """Sequences in the batch."""
        return len(self.batch.tokens)


class TokenBatches:
    """The batches of one process: of the shard's batches every `processes`-th, starting from number `rank`.

    Args:
        sequences: int64 `[count, length]`.
        first: number of the first sequence in the corpus.
        batch_size: sequences in a batch.
        skip: batches of this process that were read before an interruption.
        rank: number of this process.
        processes: number of processes. Each batch is read by exactly one of them; if the batches do not divide evenly,
            the last processes get an empty batch, because Lightning's processes run the same number of steps.
        positions: sequences begin at different positions, such that all their positions are below this; 0: all begin at 0.
        shard: the part of the corpus that this machine reads. Each batch is in exactly one shard, however many processes
            each machine runs.
    """

    def __init__(
        self,
        sequences: Tensor,
        first: int,
        batch_size: int,
        skip: int = 0,
        rank: int = 0,
        processes: int = 1,
        positions: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        self.sequences, self.first, self.batch_size = sequences, first, batch_size
        self.room = max(0, positions - sequences.shape[1])
        mine = dealt(range(0, len(sequences), batch_size), shard.number - 1, shard.count)
        self.starts = dealt(mine, rank, processes)[skip:]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[TokenBatch]:
        length = self.sequences.shape[1]
        for start in self.starts:
            tokens = self.sequences[start : start + self.batch_size]
            number = torch.arange(self.first + start, self.first + start + len(tokens))
            index = number[:, None] * length + torch.arange(length)
            yield TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), index, begins(number, self.room))


def dealt(starts: range, number: int, count: int) -> range:
    """Returns every `count`-th of `starts` from `number` on, equally many for each number; starts past the end are empty
    batches."""
    padded = range(starts.start, starts.stop + (count - 1) * starts.step, starts.step)
    return padded[number : len(padded) // count * count : count]


def begins(number: Tensor, room: int) -> Tensor:
    """Returns the first position, int64, 0 ... room, of the sequence of each `number`; consecutive numbers are spread evenly.

    RoPE is relative, so the model's output is the same from any first position; only the rotation of keys and queries differs.
    """
    return ((number.double() * GOLDEN).remainder(1) * (room + 1)).long()
