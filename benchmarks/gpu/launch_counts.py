"""Counts, on any machine, the kernels that a decode step launches in a layer: operations of torch that are kernels on a GPU, and
our own kernels. The cost of a launch is not measured.

The step runs on the CPU as it would on a GPU, our kernels in Triton's interpreter. An operation of torch is counted as one launch,
though some are two or three; views and allocations do not count. Uploads of numbers from the host are not counted either.
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

# Operations, besides views, that only allocate memory or change metadata.
ALLOCATIONS = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_", "is_pinned",
}  # fmt: skip

HEADS = Heads(rows=1, heads=4, kv_heads=2, head_dim=64)
PROMPT, STEPS, LAYERS = 200, 3, 2

# Options with which a step after a few hundred tokens uses the same stores as in a long cache.
METHODS: dict[str, dict[str, Any]] = {
    "full": {}, "rtn": {"bits": 4}, "kivi": {"bits": 2}, "klt": {"bits": 2.0, "predict": True}, "zipcache": {}, "gear": {},
    "mikv": {}, "h2o": {}, "snapkv": {}, "tova": {}, "streaming_llm": {}, "csr": {"online": 64}, "specache": {},
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Mode that counts launches inside `with`: `torch` by operation, and `ours` by kernel."""

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
    """Launches of a decode step: of `torch` and `ours` in each layer, and `once`, the number done once for all layers."""

    torch: Counter[str]
    ours: Counter[str]
    once: int

    @property
    def total(self) -> int:
        """Launches in a layer."""
        return self.torch.total() + self.ours.total()


@torch.no_grad()
def launches_of(method: str, options: dict[str, Any]) -> StepLaunches:
    """Returns the launches of the step with the fewest among `STEPS` without the first one, so that it encodes no block.

    Counted in the second layer; what the first layer launches more is work done once for all layers. The step is as in `generate`:
    with a speculative token if the method has one, and with the tokens that the step before fetched.
    """
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
    """Context that counts only the launch of our kernels, not the operations by which the interpreter runs them."""
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
    """Yields a line for each method."""
    yield f"{'method':14} {'torch':>6} {'ours':>5} {'together':>9} {'once a step':>12}"
    for method, options in methods.items():
        found = launches_of(method, options)
        torch_own, ours = found.torch.total(), found.ours.total()
        yield f"{method:14} {torch_own:6} {ours:5} {found.total:9} {found.once:12}"
