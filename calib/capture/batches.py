"""Batches of token sequences, and batches of layer samples that come into being when they are streamed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.capture import stream
from calib.capture.gradients import stream_gradients
from calib.capture.sample import Sink
from calib.capture.shard import WHOLE, Shard

GOLDEN = (5**0.5 - 1) / 2  # its multiples, less their whole parts, never leave a gap much wider than the others


@dataclass(eq=False)  # not frozen: Lightning moves a copy of it to the device field by field
class TokenBatch:
    """Token sequences on their way to the device: `tokens`, `mask` (bool) and `index` are `[batch, length]`, `begins [batch]` the
    positions of their first tokens."""

    tokens: Tensor
    mask: Tensor
    index: Tensor
    begins: Tensor


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """A batch whose layer samples come into being when they are asked for, one at a time."""

    model: PreTrainedModel
    batch: TokenBatch

    def stream(self, sink: Sink) -> None:
        """Runs the model once; `sink` receives each layer's sample as the forward pass reaches it, none if empty."""
        if len(self):
            batch = self.batch
            stream(self.model, batch.tokens, batch.mask, batch.index, sink, batch.begins)

    def stream_gradients(self, seed: int, sink: Sink) -> list[str]:
        """Differentiates the model; `sink` receives each sequence's and layer's derivatives. Returns why some have none."""
        if not len(self):
            return []
        batch = self.batch
        return stream_gradients(self.model, batch.tokens, batch.mask, batch.index, seed, sink, batch.begins)

    def __len__(self) -> int:
        """Sequences in the batch."""
        return len(self.batch.tokens)


class TokenBatches:
    """The batches of one process: sequences `[count, length]` in order, every `processes`-th batch of the shard from `rank` on.

    Args:
        sequences: int64 `[count, length]`.
        first: number of the first sequence in the corpus.
        batch_size: sequences in a batch.
        skip: batches of this process that were read before an interruption.
        rank: this process.
        positions: sequences begin anywhere at which all of their positions are below this; 0: all begin at 0.
        processes: how many there are. Each batch is read by exactly one; where they do not share out evenly the last
            ones get an empty batch, because Lightning's processes keep step.
        shard: what this machine reads of the corpus. Each batch is in exactly one shard, whatever the machines' processes.
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
    """Every `count`-th of `starts` from `number` on, as many for each number: those beyond the last one begin empty batches."""
    padded = range(starts.start, starts.stop + (count - 1) * starts.step, starts.step)
    return padded[number : len(padded) // count * count : count]


def begins(number: Tensor, room: int) -> Tensor:
    """The position at which the sequence of each `number` begins, 0 ... room: any run of numbers is spread evenly over it.

    RoPE is relative, so a model says the same there; keys and queries are rotated as a cache sees them that far on.
    """
    return ((number.double() * GOLDEN).remainder(1) * (room + 1)).long()
