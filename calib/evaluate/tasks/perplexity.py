"""Perplexity through the cache: a prefill, then chunks, so that every scored token is predicted from compressed ones.

Only what follows the prefill is scored. Tokens of one chunk see each other exactly, as in every forward, so small chunks
show more of the compression and take longer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from calib.errors import RunError, UsageError
from calib.evaluate.bootstrap import mean_interval
from calib.evaluate.feed import Feed
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.text import Text, TextSequences, text_source
from calib.runtime.cache import CompressedCache
from calib.testbed.corpus import TextSource


@dataclass(frozen=True)
class Perplexity:
    """One column.

    Args:
        text: a UTF-8 file, a list of them, a data set of the hub as {name:, config:, split:, column:}, or None: text
            sampled from the model itself at temperature 1, which needs no network.
        natural_spacing: take WikiText's tokenised spacing (` @-@ `, ` ,`) back to written English.
        prefill: tokens of a sequence's first forward, not scored.
        chunk: tokens of each later forward.
        length: tokens in a sequence.
        tokens: tokens scored in all, rounded up to whole sequences.
        title: the column's.
    """

    text: Text = None
    natural_spacing: bool = False
    prefill: int = 256
    chunk: int = 16
    length: int = 512
    tokens: int = 16384
    title: str = "perplexity"

    def __post_init__(self) -> None:
        for option, least in (("prefill", 1), ("chunk", 1), ("length", 2), ("tokens", 1)):
            whole_number("perplexity", option, getattr(self, option), least)
        if self.prefill >= self.length:
            raise UsageError(
                f"tasks.perplexity: prefill={self.prefill} leaves nothing to score in sequences of length={self.length}"
            )
        check_title("perplexity", self.title)
        self.source()

    def source(self) -> TextSource | None:
        """Where the text comes from; None when it is sampled."""
        return text_source("perplexity", self.text, self.natural_spacing)

    def titles(self) -> list[str]:
        """Its one title."""
        return [self.title]

    def columns(self, subject: Subject) -> list[Column]:
        """Reads the text; refuses sequences longer than the model was made for and text that does not fill one."""
        return [TextColumn(self, subject)]


class TextColumn:
    """Sequences of one text."""

    measure_name = "perplexity"

    def __init__(self, task: Perplexity, subject: Subject) -> None:
        self.title, self.task, self.subject = task.title, task, subject
        count = -(-task.tokens // (task.length - task.prefill))
        self.text = TextSequences("perplexity", task.source(), subject, task.length, count)
        self.rows = self.text.count
        numbers = {"prefill": task.prefill, "chunk": task.chunk, "length": task.length, "sequences": self.rows}
        self.settings: dict[str, Any] = {"task": "perplexity", **self.text.origin, **numbers}
        self.prompt, self.length = float(task.prefill), float(task.length - 1)

    def batches(self) -> list[Tensor]:
        """The sequences, [at most batch_size, length] each."""
        return self.text.batches()

    def measure(self, cache: CompressedCache, batch: Tensor) -> Tensor:
        """[rows] float64: nats of the scored tokens of each sequence."""
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

    def summary(self, parts: Sequence[Tensor]) -> dict[str, float | int]:
        """Perplexity per token with its 95 % interval (bootstrap over sequences), and what it was taken on."""
        nats = torch.cat(list(parts)).numpy()
        scored = self.task.length - self.task.prefill
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
        """ "16.64 [16.20, 17.10]"."""
        return "{perplexity:.2f} [{low:.2f}, {high:.2f}]".format(**figures)

    def brief(self, figures: dict[str, float | int]) -> str:
        """ "16.64"."""
        return "{perplexity:.2f}".format(**figures)
