"""Perplexity with the cache: text is fed as a prefill and then chunks, so that scored tokens are predicted from compressed ones.

Only the tokens after the prefill are scored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from calib.errors import RunError
from calib.evaluate.bootstrap import mean_interval
from calib.evaluate.feed import Feed
from calib.evaluate.tasks.chunked_text import ChunkedText, ChunkedTextColumn
from calib.evaluate.tasks.contract import Column, Subject, numbers


@dataclass(frozen=True)
class Perplexity(ChunkedText):
    """A task with one column; its options are those of `ChunkedText`."""

    name = "perplexity"
    purpose = "score"

    tokens: int = 16384
    title: str = "perplexity"

    def columns(self, subject: Subject) -> list[Column]:
        """Reads the text; raises UsageError for sequences beyond the model's positions, or text too short for one sequence."""
        return [TextColumn(self, subject)]


class TextColumn(ChunkedTextColumn):
    """Sequences of one text."""

    measure_name = "perplexity"

    def __init__(self, task: Perplexity, subject: Subject) -> None:
        super().__init__(task, subject)
        self.length = float(task.length - 1)  # nothing is predicted from the last token

    def batches(self) -> list[Tensor]:
        """Returns the sequences as tensors [at most batch_size, length]."""
        return self.text.batches()

    def measure(self, cache: Cache, batch: Tensor) -> Tensor:
        """Returns [rows] float64: negative log-probability in nats of each sequence's scored tokens, summed."""
        feed, task, end = Feed(self.subject.model, cache), self.task, batch.shape[1]
        last = feed(batch[:, : task.prefill], only_last=True)
        nats = torch.zeros(len(batch), dtype=torch.float64)
        for start in range(task.prefill, end, task.chunk):
            wanted = batch[:, start : start + task.chunk]
            fed = wanted[:, : end - 1 - start]  # nothing is predicted from the last token
            logits = torch.cat((last, feed(fed)), dim=1) if fed.shape[1] else last
            scored, last = logits[:, : wanted.shape[1]], logits[:, wanted.shape[1] :]
            loss = functional.cross_entropy(scored.flatten(0, 1), wanted.flatten(), reduction="none")
            nats += loss.double().view(len(batch), -1).sum(1).cpu()
        return nats

    def cases(self) -> dict[str, Any]:
        """Returns the sequences and the sizes of their prefill and chunks, as plain JSON."""
        batches = [{"tokens": batch.tolist()} for batch in self.batches()]
        return {"kind": "text", "prefill": self.task.prefill, "chunk": self.task.chunk, "batches": batches}

    def read_part(self, batch: Tensor, content: Mapping[str, Any]) -> Tensor:
        """Converts {"nats": one number for each sequence} to [rows] float64."""
        return numbers(content, "nats", len(batch))

    def summary(self, parts: Sequence[Tensor]) -> dict[str, float | int]:
        """Returns the perplexity per token with its 95 % interval (bootstrap over sequences), and the numbers of sequences and
        tokens."""
        nats = torch.cat(list(parts)).numpy()
        scored = self.task.counted
        if not np.isfinite(nats).all():
            raise RunError("the model's logits are not finite")
        low, high = mean_interval(nats / scored, self.subject.seed)
        return {
            "perplexity": math.exp(nats.mean() / scored),
            "low": math.exp(low),
            "high": math.exp(high),
            "sequences": len(nats),
            "tokens": len(nats) * scored,
        }

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns "16.64 [16.20, 17.10]"."""
        return "{perplexity:.2f} [{low:.2f}, {high:.2f}]".format(**figures)

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns "16.64"."""
        return "{perplexity:.2f}".format(**figures)
