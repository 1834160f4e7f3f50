"""A row's cache in use: prefill of the prompt, then decoding of one token after another."""

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
    """A new cache of `entry`; as a context manager it closes the cache at the end.

    Args:
        bench_model: the model and the request.
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
        """Closes the cache and detaches it from the model."""
        self.entry.close(self.cache)

    def prefill(self) -> list[int]:
        """Forward the prompt and return each row's first new token, copied to the host."""
        self.last = self.forward(self.prompt).argmax(-1)
        found: list[int] = self.last[:, 0].tolist()
        return found

    def decode(self, steps: int) -> Tensor:
        """Decodes greedily for `steps` steps of one token per row; returns the last step's logits [batch, 1, vocabulary]."""
        for _ in range(steps):
            logits = self.forward(self.last)
            self.last = logits.argmax(-1)
        self.steps += steps
        return logits

    def check(self, logits: Tensor) -> None:
        """Raises RunError for logits that are not finite, for which no times are reported."""
        if not bool(logits.isfinite().all()):
            raise RunError("the model's logits are not finite")

    def cache_size(self) -> CacheSize:
        """Returns the cache's current size."""
        batch, context = self.prompt.shape
        return self.entry.cache_size(self.bench_model.given, self.cache, batch * (context + self.steps))

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Forward `tokens` [batch, n] and return the logits [batch, 1, vocabulary] of the last one."""
        ours = isinstance(self.cache, CompressedCache)
        attention: AbstractContextManager[None] = nullcontext() if ours else self.bench_model.own_attention()
        with attention:
            logits = self.bench_model.model(
                input_ids=tokens, use_cache=True, **{cache_argument.NAME: self.cache}, **self.options
            ).logits
        last: Tensor = logits[:, -1:]
        return last
