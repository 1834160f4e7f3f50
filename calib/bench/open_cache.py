"""A row's cache while it is in use: the prompt goes in, then one token after another."""

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor

from calib.bench.bench_model import BenchModel
from calib.bench.request import title_of
from calib.errors import RunError
from calib.evaluate.cache_size import CacheSize
from calib.evaluate.entries import CacheEntry
from calib.runtime import cache_argument
from calib.runtime.cache import CompressedCache


class OpenCache:
    """A fresh cache of `entry`, a context that lets go of it.

    Args:
        subject: the model.
        entry: the row.
        prompt: tokens [batch, context] int64.
    """

    def __init__(self, bench_model: BenchModel, entry: CacheEntry, prompt: Tensor) -> None:
        self.bench_model, self.entry, self.prompt, self.steps = bench_model, entry, prompt, 0
        self.last = prompt[:, :0]
        self.cache = entry.open(bench_model.given, title_of(prompt.shape[1]))
        model = bench_model.model
        self.options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def __enter__(self) -> "OpenCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the cache; the model is as before."""
        self.entry.close(self.cache)

    def prefill(self) -> list[int]:
        """One forward of the prompt; each row's first new token, which is on the host by then."""
        self.last = self.forward(self.prompt).argmax(-1)
        found: list[int] = self.last[:, 0].tolist()
        return found

    def decode(self, steps: int) -> Tensor:
        """Greedy steps of one token a row; logits [batch, 1, vocabulary] of the last one."""
        for _ in range(steps):
            logits = self.forward(self.last)
            self.last = logits.argmax(-1)
        self.steps += steps
        return logits

    def check(self, logits: Tensor) -> None:
        """Raises RunError for logits that are no numbers: nothing is said about their speed."""
        if not bool(logits.isfinite().all()):
            raise RunError("the model's logits are not finite")

    def cache_size(self) -> CacheSize:
        """The cache's size now."""
        batch, context = self.prompt.shape
        return self.entry.cache_size(self.bench_model.given, self.cache, batch * (context + self.steps))

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, 1, vocabulary] of the last of `tokens` [batch, n]."""
        ours = isinstance(self.cache, CompressedCache)
        attention: AbstractContextManager[None] = nullcontext() if ours else self.bench_model.own_attention()
        with attention:
            logits = self.bench_model.model(
                input_ids=tokens, use_cache=True, **{cache_argument.NAME: self.cache}, **self.options
            ).logits
        last: Tensor = logits[:, -1:]
        return last
