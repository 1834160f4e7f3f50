"""How many kernels a decode step launches in a layer, counted on any machine: operations of torch that are kernels on a GPU, and
our own kernels. What a launch costs is not in it.

The step runs on the CPU as it would on a GPU, our kernels in Triton's interpreter. An operation of torch is counted as one launch,
though some are two or three; views and allocations are none. Numbers that the host uploads are not seen.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.gpu.inputs import queries, tokens
from benchmarks.gpu.layers import Heads, bare_layers, forward

# What only makes or names memory, besides views.
ALLOCATIONS = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_", "is_pinned",
}  # fmt: skip

HEADS = Heads(rows=1, heads=4, kv_heads=2, head_dim=64)
PROMPT, STEPS, LAYERS = 200, 3, 2

# Options under which a step in a few hundred tokens reads what it reads in a long cache.
METHODS: dict[str, dict[str, Any]] = {
    "full": {}, "rtn": {"bits": 4}, "kivi": {"bits": 2}, "klt": {"bits": 2.0, "predict": True}, "zipcache": {}, "gear": {},
    "mikv": {}, "h2o": {}, "snapkv": {}, "tova": {}, "streaming_llm": {}, "csr": {"online": 64}, "specache": {},
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts inside `with`: `torch`, by operation, and `ours`, by kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self.ours: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        is_view = any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)
        if not is_view and name not in ALLOCATIONS and "view" not in name:
            self.torch[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class StepLaunches:
    """Launches of a decode step: of `torch` and `ours` in a layer, and of either `once`, for all layers together."""

    torch: Counter[str]
    ours: Counter[str]
    once: int

    @property
    def total(self) -> int:
        """In a layer."""
        return self.torch.total() + self.ours.total()


@torch.no_grad()
def launches_of(method: str, options: dict[str, Any]) -> StepLaunches:
    """Of the step with the fewest among `STEPS`, but the first: one in which no block is encoded. The layer is the second: what the
    first works out for all is what it launches more. A step is one of those that `generate` makes: with a speculative token where
    the method has one, and what the step before fetched."""
    layers, width = bare_layers(method, HEADS, LAYERS, **options), 1
    if method == "specache":
        width += options.get("speculative", True)
    cpu, shape = torch.device("cpu"), (HEADS.rows, HEADS.kv_heads)
    given = [tokens(*shape, PROMPT, HEADS.head_dim, seed, cpu, torch.bfloat16) for seed in range(2)]
    query = queries(given[0], HEADS.heads, PROMPT, 3)
    for layer in layers:
        forward(layer, query, *given)
    found = []
    for step in range(STEPS):
        new = [tokens(*shape, width, HEADS.head_dim, 10 * step + seed, cpu, torch.bfloat16) for seed in range(5, 7)]
        asked = query[:, :, step : step + width].contiguous()  # as a model makes it
        counted = [Launches() for _ in layers]
        for layer, own in zip(layers, counted, strict=True):
            with _interpreted(own), own:
                forward(layer, asked, *new, speculative=width > 1)
        first, second = counted
        once = first.torch.total() + first.ours.total() - second.torch.total() - second.ours.total()
        found.append(StepLaunches(second.torch, second.ours, once))
    return min(found[1:], key=lambda one: one.total)


@contextmanager
def _interpreted(launches: Launches) -> Iterator[None]:
    """Our kernels, uncounted but for their launch: what the interpreter does is no operation of the step."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        launches.ours[kernel.__name__] += 1
        with _disable_current_modes():
            return run(kernel, *arguments, **options)

    InterpretedFunction.run = counted
    try:
        yield
    finally:
        InterpretedFunction.run = run


def table(methods: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each method."""
    yield f"{'method':14} {'torch':>6} {'ours':>5} {'together':>9} {'once a step':>12}"
    for method, options in methods.items():
        found = launches_of(method, options)
        torch_own, ours = found.torch.total(), found.ours.total()
        yield f"{method:14} {torch_own:6} {ours:5} {found.total:9} {found.once:12}"
