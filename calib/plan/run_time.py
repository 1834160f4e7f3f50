"""Seconds of a model's own forwards, extrapolated from timings of one layer with random weights on this machine.

A prompt's time is assumed to grow with its floating-point operations (`duration.flops`). A forward after the prompt is timed with
its real number of tokens over an exact cache, and scaled to the batch if fewer rows are timed. The output head is timed over a part
of the vocabulary. The time that a method adds to a forward or saves is not included.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from calib.errors import UsageError
from calib.evaluate.loaded import usable_device
from calib.evaluate.products import multiply_in_float32
from calib.plan.duration import extrapolated, flops
from calib.plan.meta_model import MetaModel
from calib.plan.probe import FIRST, GROWTH, random_layer, seconds
from calib.runtime import cache_argument

# Ratio of real to predicted time of real runs (docs/plan.md, "Compared with real runs").
LEAST, MOST = 0.5, 3.0

BUDGET = 2.0  # seconds for timing prompts
WORDS = 8192  # vocabulary entries of the timed output head
KEPT = 2**27  # most bytes of the keys and values that a timed forward attends to


@dataclass
class RunPace:
    """Timings of one layer and of the output head, from which the seconds of a model's forwards are extrapolated.

    Attributes:
        meta_model: the model.
        device: where pieces are timed.
        products: `products` of the evaluation request: "model", or "float32" for matrix products in float32.
        tokens: tokens of the timed prompt.
        prompt: seconds of one layer for that prompt.
        steps: seconds of a forward of one layer, by number of rows, new tokens of each row, and cached tokens of each row.
        heads: seconds of the output head over the whole vocabulary, by number of positions.
    """

    meta_model: MetaModel
    device: torch.device
    products: str = "model"
    tokens: int = 0
    prompt: float = 0.0
    steps: dict[tuple[int, int, int], float] = field(default_factory=dict)
    heads: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._layer = random_layer(self.meta_model, self.device)
        if self.products == "float32":
            multiply_in_float32(self._layer)

    @torch.no_grad()
    def measure_prompt(self, longest: int) -> None:
        """Times growing prompts up to `longest` tokens, or until the next one would exceed `BUDGET` seconds."""
        size, end = min(FIRST, longest), time.perf_counter() + BUDGET
        self._prompt(size)  # the first run takes longer
        while True:
            self.tokens, self.prompt = size, self._prompt(size)
            if size >= longest or time.perf_counter() + GROWTH * self.prompt > end:
                return
            size = min(GROWTH * size, longest)

    def _prompt(self, tokens: int) -> float:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.device)
        return seconds(partial(self._layer.base_model, input_ids=ids, use_cache=False), self.device)

    def prefill(self, batch: int, tokens: float) -> float:
        """Seconds of the prefill of `batch` prompts through all layers, and of the head for their last tokens."""
        piece = flops(self.meta_model, self.tokens, self.tokens)
        whole = flops(self.meta_model, batch * math.ceil(tokens), math.ceil(tokens))
        return self.meta_model.shape.layers * self.prompt * whole / piece + self.head(batch)

    @torch.no_grad()
    def step(self, batch: int, tokens: int, before: int) -> float:
        """Seconds of a forward of `tokens` new tokens in each of `batch` rows with `before` cached tokens, output head included."""
        shape, dtype = self.meta_model.shape, self._layer.dtype
        row = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize * max(before, 1)
        rows = max(1, min(batch, KEPT // row))
        if (rows, tokens, before) not in self.steps:
            held = torch.randn(rows, shape.kv_heads, before, shape.head_dim, device=self.device).to(dtype)
            cache, ids = DynamicCache(), torch.zeros(rows, tokens, dtype=torch.int64, device=self.device)
            cache.update(held, held, 0)

            def forward() -> None:
                self._layer.base_model(input_ids=ids, use_cache=True, **{cache_argument.NAME: cache})
                cache.layers[0].keys = cache.layers[0].values = held

            forward()
            self.steps[rows, tokens, before] = seconds(forward, self.device)
        one = self.steps[rows, tokens, before] * batch / rows
        return shape.layers * one + self.head(batch * tokens)

    @torch.no_grad()
    def head(self, positions: int) -> float:
        """Seconds of the logits of `positions` positions."""
        if positions not in self.heads:
            width, words = self.meta_model.text.hidden_size, int(self.meta_model.text.vocab_size)
            dtype = torch.float32 if self.products == "float32" else self._layer.dtype
            weight = torch.ones(min(words, WORDS), width, dtype=dtype, device=self.device)
            x = torch.ones(positions, width, dtype=dtype, device=self.device)
            taken = seconds(lambda: functional.linear(x, weight), self.device)
            self.heads[positions] = taken * words / len(weight)
        return self.heads[positions]


def seconds_content(
    meta_model: MetaModel,
    device: str,
    products: str,
    longest: int,
    work: Callable[[RunPace], dict[str, float]],
) -> dict[str, Any] | None:
    """Returns the predicted seconds of every part (see `extrapolated`), or None if this machine has no such device.

    Args:
        meta_model: the model.
        device: name of the device.
        products: as of `RunPace`.
        longest: tokens of the longest prompt.
        work: computes the seconds of every part from the timings.
    """
    try:
        where = usable_device(device)
    except UsageError:
        return None

    def measured() -> tuple[RunPace, dict[str, float]]:
        with torch.random.fork_rng([where] if where.type == "cuda" else []):
            pace = RunPace(meta_model, where, products)
            pace.measure_prompt(longest)
            return pace, work(pace)

    return extrapolated(measured, where, (LEAST, MOST), lambda pace: {"tokens": pace.tokens, "prompt": pace.prompt})
