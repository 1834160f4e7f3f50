"""Counts, on any machine and at the real shape, what a method launches in a layer's prefill beyond a prefill without compression:
our kernels with their arguments, and operations of torch with the bytes that each has to move.

    python -m benchmarks.gpu.prefill_launches CAPABILITY METHOD ...      # as JSON; a METHOD may be a way of `encoding.py`

The layer runs on the CPU as it would on a GPU. Attention over the prompt is part of every prefill, so it is neither counted nor
computed. Our kernels are not run either; their outputs are filled with numbers, so that 32,768 tokens take seconds. Operations on
the host are not counted, uploads to the device are, and an operation with an empty result launches nothing.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.gpu.host_tensors import HostTensors
from benchmarks.gpu.inputs import tokens
from benchmarks.gpu.launch_counts import ALLOCATIONS
from benchmarks.gpu.layers import Heads, bare_layers, forward
from benchmarks.gpu.prefill_bytes import bytes_of, moved, products_of, tensors_in
from benchmarks.gpu.sizes import REAL
from calib.kernels.ahead_of_time import CAPABILITIES

LAYERS = 2  # the second is counted, without the work that the first does once for all layers

# Options of the methods whose defaults differ from those on the other pages.
OPTIONS: dict[str, dict[str, Any]] = {"rtn": {"bits": 4}, "klt": {"bits": 2.0}}

KINDS = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel of ours.

    Args:
        module, kernel: the kernel's module and name.
        grid: programs along each axis.
        types: of each tensor and number, as in `Specialisation.types` but without alignment.
        values: of each number and constant.
        warps, stages, fusion: options of the launch.
        tensors: bytes of each tensor argument.
        probes: positions of the query rows of a score kernel; None for other kernels.
    """

    module: str
    kernel: str
    grid: list[int]
    types: dict[str, str]
    values: dict[str, Any]
    warps: int
    stages: int
    fusion: bool
    tensors: dict[str, int]
    probes: list[int] | None = None


@dataclass
class TorchLaunches:
    """All launches of an operation of torch: the least bytes that they move, and multiply-adds of matrix products."""

    launches: int = 0
    bytes: int = 0
    products: int = 0


@dataclass
class Noted:
    """What was launched: operations of `torch` by name, and `ours` in order.

    `waits`: how often the host waits until the device has finished all queued work; `reads`: how often only for work queued before
    the layer's attention.
    """

    torch: dict[str, TorchLaunches] = field(default_factory=dict)
    ours: list[KernelLaunch] = field(default_factory=list)
    waits: int = 0
    reads: int = 0


class Noting(TorchDispatchMode):
    """Mode that records operations of torch inside `with`."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self.noted, self.host = noted, HostTensors()

    def __enter__(self) -> "Noting":
        self.host.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.host.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        given, made = list(tensors_in([args, kwargs])), list(tensors_in(found))
        is_view = any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)
        if self.host.owns(given, made):
            return found
        if name == "_local_scalar_dense":
            self.noted.waits += 1
        elif not is_view and name not in ALLOCATIONS and "view" not in name and any(part.numel() for part in made):
            own = self.noted.torch.setdefault(name, TorchLaunches())
            own.launches += 1
            own.bytes += moved(name, given, made)
            own.products += products_of(name, given)
        return found


@contextmanager
def kernels_noted(noted: Noted, runs: bool) -> Iterator[None]:
    """Context that records launches of our kernels, and runs them only with `runs`."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def instead(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        with _disable_current_modes():
            named = dict(zip(kernel.arg_names, given, strict=False)) | options
            noted.ours.append(kernel_launch(kernel, named, grid))
            if runs:
                return run(kernel, *given, grid=grid, warmup=warmup, **options)
            fill(kernel.__name__, named)
            return None

    with mock.patch.object(InterpretedFunction, "run", instead):
        yield


def kernel_launch(kernel: Any, named: dict[str, Any], grid: Any) -> KernelLaunch:
    """Returns the record of a launch of `kernel` with its arguments by name."""
    constants = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    types, values, tensors = {}, {}, {}
    for name in kernel.arg_names:
        value = named.get(name)
        if isinstance(value, Tensor):
            types[name], tensors[name] = f"*{KINDS[value.dtype]}", bytes_of(value)
            continue
        values[name] = value
        if name not in constants and value is not None:
            types[name] = "fp32" if isinstance(value, float) else "i32"
    probes = named["positions"][: named["probes"]].tolist() if "probes" in named else None
    asked = named.get("num_warps", 4), named.get("num_stages", 3), named.get("enable_fp_fusion", True)
    return KernelLaunch(kernel.fn.__module__, kernel.__name__, list(grid), types, values, *asked, tensors, probes)


def fill(kernel: str, named: dict[str, Any]) -> None:
    """Fills the outputs of a kernel that is not run with numbers that the rest of the store can work with."""
    if kernel == "column_sums":
        named["mass"].uniform_(generator=torch.Generator().manual_seed(0))
    if kernel == "largest":
        chosen, others, k = named["chosen"], named["others"], named["k"]
        chosen.copy_(torch.arange(k))
        if others is not None:
            others.copy_(torch.arange(k, named["tokens"]))
    for name in (
        "words",
        "parameters",
        "words_1",
        "parameters_1",
        "normalisers",
        "UNROTATED",
        "EXTREMES",
        "CENTER",
        "NUMBERS",
    ):
        if isinstance(named.get(name), Tensor):
            named[name].zero_()


@torch.no_grad()
def prefill_of(
    method: str, options: dict[str, Any], heads: Heads, count: int, runs: bool = False, capability: int = 90
) -> Noted:
    """Returns what a layer launches for a prompt of `count` tokens, as on a GPU of this capability."""
    layers = bare_layers(method, heads, LAYERS, **options)
    cpu, shape = torch.device("cpu"), (heads.rows, heads.kv_heads)
    given = [tokens(*shape, count, heads.head_dim, seed, cpu, torch.bfloat16) for seed in range(2)]
    query = tokens(heads.rows, heads.heads, count, heads.head_dim, 3, cpu, torch.bfloat16)
    noted = Noted()
    for layer in layers:
        noted = Noted()
        with as_on_a_gpu(capability), kernels_noted(noted, runs), answers_noted(noted), Noting(noted):
            forward(layer, query, *given)
    return noted


def encoding_of(way: str) -> Noted:
    """Returns what a way of `encoding.py` launches for keys and values of shape A."""
    from benchmarks.gpu.encoding import WAYS

    shape = (REAL.batch, REAL.kv_heads, REAL.tokens, REAL.head_dim)
    given, noted = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)], Noted()
    with kernels_noted(noted, False), Noting(noted):
        WAYS[way](*given)
    return noted


@contextmanager
def answers_noted(noted: Noted) -> Iterator[None]:
    """Context that counts reads of extremes on the host, and does not record the host's work with them."""
    from calib.runtime.device.extremes import Extremes
    from calib.runtime.ordered.stream import Stream
    from calib.runtime.tiered.store import TieredStore

    def on_host(settle: Callable[[Any], None]) -> Callable[[Any], None]:
        def uncounted(store: Any) -> None:
            with _disable_current_modes():
                settle(store)

        return uncounted

    read = Extremes.read

    def counted(extremes: Extremes) -> Tensor:
        noted.reads += 1
        return read(extremes)

    with ExitStack() as entered:
        entered.enter_context(mock.patch.object(Extremes, "read", counted))
        for owner in (Stream, TieredStore):
            entered.enter_context(mock.patch.object(owner, "settle", on_host(owner.settle)))
        yield


@contextmanager
def as_on_a_gpu(capability: int) -> Iterator[None]:
    """Context without attention over the prompt, and in which codecs encode all tokens at once, not in pieces as on a CPU."""
    from calib.kernels.probe_saliency import triton
    from calib.runtime.stages.codec import encoded
    from calib.runtime.tiered import store

    with ExitStack() as entered:
        in_place = (
            (triton, "capability_of", lambda device: divmod(capability, 10)),
            (F, "scaled_dot_product_attention", unattended),
            (encoded, "at_once", all_of),
        )
        for module, name, own in (*in_place, (store, "prompt_normalised", unattended_normalised)):
            entered.enter_context(mock.patch.object(module, name, own))
        yield


def unattended(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Replaces attention: returns the query."""
    return query


def unattended_normalised(request: Any) -> tuple[Tensor, Tensor]:
    """Replaces attention that also returns its rows' normalisers, as torch's flash backend does."""
    query = request.given.query
    return query, query.new_empty(query.shape[:3], dtype=torch.float32)


def all_of(codec: Any, given: Tensor, count: int) -> int:
    """Replaces the size of a piece by all tokens."""
    return count


def main() -> None:
    """Prints the launches of some methods as JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("capability", type=int, choices=CAPABILITIES, help="of the GPU, times ten")
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    asked = parser.parse_args()
    os.environ |= {"CALIB_KERNELS": "triton", "TRITON_INTERPRET": "1"}  # before a kernel is imported
    heads = Heads(1, REAL.heads, REAL.kv_heads, REAL.head_dim)

    def noted(name: str) -> Noted:
        if "pass" in name:
            return encoding_of(name)
        return prefill_of(name, OPTIONS.get(name, {}), heads, REAL.prompt, capability=asked.capability)

    print(json.dumps({name: asdict(noted(name)) for name in asked.methods}))


if __name__ == "__main__":
    main()
