"""Batches of token sequences, and batches of layer samples that come into being when they are streamed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.capture import stream
from calib.capture.gradients import stream_gradients
from calib.capture.sample import Sink


@dataclass(eq=False)  # not frozen: Lightning moves a copy of it to the device field by field
class TokenBatch:
    """Token sequences on their way to the device: `tokens`, `mask` (bool) and `index` are `[batch, length]`."""

    tokens: Tensor
    mask: Tensor
    index: Tensor


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """A batch whose layer samples come into being when they are asked for, one at a time."""

    model: PreTrainedModel
    batch: TokenBatch

    def stream(self, sink: Sink) -> None:
        """Runs the model once; `sink` receives each layer's sample as the forward pass reaches it, none if empty."""
        if len(self):
            stream(self.model, self.batch.tokens, self.batch.mask, self.batch.index, sink)

    def stream_gradients(self, seed: int, sink: Sink) -> list[str]:
        """Differentiates the model; `sink` receives each sequence's and layer's derivatives. Returns why some have none."""
        if not len(self):
            return []
        return stream_gradients(self.model, self.batch.tokens, self.batch.mask, self.batch.index, seed, sink)

    def __len__(self) -> int:
        """Sequences in the batch."""
        return len(self.batch.tokens)


class TokenBatches:
    """The batches of one process: sequences `[count, length]` in order, every `processes`-th batch from `rank` on.

    Args:
        sequences: int64 `[count, length]`.
        first: number of the first sequence in the corpus.
        batch_size: sequences in a batch.
        skip: batches of this process that were read before an interruption.
        rank: this process.
        processes: how many there are. Each batch is read by exactly one; where they do not share out evenly the last
            ones get an empty batch, because Lightning's processes keep step.
    """

    def __init__(
        self, sequences: Tensor, first: int, batch_size: int, skip: int = 0, rank: int = 0, processes: int = 1
    ) -> None:
        self.sequences, self.first, self.batch_size = sequences, first, batch_size
        starts = range(0, len(sequences) + (processes - 1) * batch_size, batch_size)
        self.starts = starts[rank : len(starts) // processes * processes : processes][skip:]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[TokenBatch]:
        length = self.sequences.shape[1]
        for start in self.starts:
            tokens = self.sequences[start : start + self.batch_size]
            number = torch.arange(self.first + start, self.first + start + len(tokens))
            index = number[:, None] * length + torch.arange(length)
            yield TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), index)
