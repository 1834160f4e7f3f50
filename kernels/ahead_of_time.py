"""Compiles all Triton kernels without a GPU, and checks the instruction counts of their inner loops against limits.

Triton's package contains the assembler and the disassembler, so the instructions that the inner loop takes per code can be counted
on a machine without a GPU. They are what limits attention over packed tokens ("Kernels" in README.md of `kernels/attend`).

    python -m calib.kernels.ahead_of_time attend quantise              # compiles these operations' kernels, prints the figures
    python -m calib.kernels.ahead_of_time --compile --capability 90    # compiles all kernels for one GPU, checks no limits

It does not work with TRITON_INTERPRET=1: an interpreted kernel cannot be compiled.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from math import inf, isfinite
from multiprocessing import get_context
from typing import Any

from calib.kernels.compiled_loop import loop_figures
from calib.kernels.occupancy import programs_at_once
from calib.kernels.turn_alone import turn_alone

# Compute capabilities that every kernel must compile for: A100, H100/H200 and B200.
CAPABILITIES = (80, 90, 100)
HOPPER = 90

# On this capability programs of four and more warps use other matrix instructions, which wait in loops of their own, and registers
# are allocated differently. So kernels of several warps, or with allowed spills, are only compiled and printed, not checked.
NEWEST = 100

MOST_PROCESSES = 8  # compiler processes at the same time; each takes about a gigabyte

# Largest allowed ratio of two costs that should be equal; smaller differences come from the compiler's order of instructions.
MOST_BESIDE = 1.02

OPERATIONS = (
    "attend",
    "channel_ranges",
    "components",
    "quantise",
    "probe_saliency",
    "matching_pursuit",
    "neural_dict",
    "desparsify_attend",
    "heavy_hitters",
    "fetched_masks",
    "host_gather",
    "outliers",
    "predictions",
    "probability_mass",
    "put_tokens",
    "top_k",
    "trellis",
    "unrotate",
)


@dataclass(frozen=True)
class Specialisation:
    """One specialisation of a Triton kernel (argument types, constants, launch options), and the limits for its longest loop.

    Args:
        kernel: the function under `triton.jit`.
        types: type of each argument that is not a constant: "*fp16" is a pointer aligned to 16 bytes, "i32" a number, "i32:16" a
            number divisible by 16. (At a real launch Triton derives the type and the divisibility from the arguments.)
        constants: value of each constant argument; EARLY is replaced by whether the capability supports it (`early_launch.py`).
        warps, stages: `num_warps` and `num_stages` of the launch.
        codes: codes that all lanes together process in one iteration of the longest loop, or in the whole program if it has no
            loop; 0: no limit of the loop is checked.
        most: largest allowed number of instructions per code; inf: they are only counted.
        words: the int16 words that hold these codes; 0: the cost per word is not counted.
        matrix: largest allowed number of matrix instructions of a warp per 128 codes.
        spilled: register spill per lane that is allowed, in bytes.
        programs: programs that must fit one multiprocessor at once.
        barriers: largest allowed number of barriers in one iteration of the loop.
        waits: largest allowed number of stops of a warp for a load from memory in one iteration.
        beside: by "code" or "word", the name of a specialisation declared earlier: the cost of a code or word here may be at most
            `MOST_BESIDE` times the cost there.
        stages_before_hopper: `num_stages` below compute capability 9.0; None: `stages`.
        fusion: whether the compiler may fuse a multiplication and an addition (`enable_fp_fusion` of the launch).
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    codes: int = 0
    most: float = inf
    words: int = 0
    matrix: float = 1.0
    spilled: int = 0
    programs: int = 1
    barriers: float = inf
    waits: float = inf
    beside: Mapping[str, str] = field(default_factory=dict)
    stages_before_hopper: int | None = None
    fusion: bool = True


def compiled(one: Specialisation, capability: int) -> Any:
    """Compiles a specialisation for GPUs of a compute capability (80, 90 or 100) and returns Triton's `CompiledKernel`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = one.kernel.arg_names
    types = {name: "constexpr" if name in one.constants else one.types[name] for name in names}
    signature = {name: kind.removesuffix(":16") for name, kind in types.items()}
    aligned = [i for i, name in enumerate(names) if types[name].startswith("*") or types[name].endswith(":16")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    constants = {(names.index(name),): value for name, value in one.constants.items()}
    if "EARLY" in one.constants:
        constants[(names.index("EARLY"),)] = capability >= HOPPER
    source = ASTSource(one.kernel, signature, constexprs=constants, attrs=attributes)
    before = one.stages_before_hopper if capability < HOPPER else None
    options = {"num_warps": one.warps, "num_stages": before or one.stages, "enable_fp_fusion": one.fusion}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def declared(operation: str) -> dict[str, Specialisation]:
    """Returns the specialisations of an operation by name: `SPECIALISATIONS` of its `triton.py`."""
    found: dict[str, Specialisation] = import_module(f"calib.kernels.{operation}.triton").SPECIALISATIONS
    return found


def report(operations: Iterable[str], capabilities: Iterable[int] = CAPABILITIES) -> Iterable[tuple[str, bool]]:
    """Compiles each specialisation for each capability; yields a line of figures and whether all limits are met."""
    for operation in operations:
        costs: dict[tuple[str, int, str], float] = {}
        for name, one in declared(operation).items():
            for capability in capabilities:
                figures = loop_figures(compiled(one, capability))
                line = f"{operation:18} {name:34} sm_{capability}"
                line += f"  {figures.registers:3} registers, {figures.spilled:3} spilled bytes, {figures.shared:6} shared bytes"
                programs = programs_at_once(figures.registers, figures.shared, one.warps, capability)
                line += f", {programs:2} programs at once"
                good = programs >= one.programs
                if one.codes:
                    matrix = figures.matrix_per_128_codes(one.codes, one.warps)
                    waits = turn_alone(figures.lines).waits
                    good &= figures.spilled <= one.spilled and not figures.conversions and matrix <= one.matrix
                    good &= figures.barriers <= one.barriers and waits <= one.waits
                    for kind, count, most in (("code", one.codes, one.most), ("word", one.words, inf)):
                        if count:
                            cost = costs[name, capability, kind] = figures.cost(count, one.warps)
                            if kind in one.beside:
                                most = min(most, MOST_BESIDE * costs[one.beside[kind], capability, kind])
                            good &= cost <= most
                            line += f", {cost:.2f} instructions a {kind}"
                            line += f" (at most {most:.2f})" if isfinite(most) else ""
                    line += f", {matrix:.2f} matrix instructions per 128 codes, {figures.conversions} conversions"
                    line += f"; a turn: {figures.loads} loads, {waits} waits for them, {figures.barriers} barriers"
                yield line, good or (capability == NEWEST and (one.warps > 1 or one.spilled > 0))


def compile_all(operations: Iterable[str], capabilities: Sequence[int]) -> None:
    """Compiles all specialisations with one process per core and checks no limits. For Triton releases other than the one that the
    limits were written for."""
    asked = [(*one, capability) for one in names(operations) for capability in capabilities]
    with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), get_context("spawn")) as processes:
        for line in processes.map(compiled_line, *zip(*asked, strict=True)):
            print(line, flush=True)


def names(operations: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs (operation, name) of all specialisations of the operations."""
    return [(operation, name) for operation in operations for name in declared(operation)]


def compiled_line(operation: str, name: str, capability: int) -> str:
    """Compiles one specialisation for one capability; returns the line that is printed for it."""
    compiled(declared(operation)[name], capability)
    return f"{operation:18} {name} sm_{capability}"


def main() -> int:
    """Prints the figures of every kernel; returns 1 if one misses its limits, else 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []], metavar="OPERATION", help="default: all")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, help="default: all of them")
    parser.add_argument("--compile", action="store_true", help="hold nothing to limits")
    asked = parser.parse_args()
    operations = asked.operations or OPERATIONS
    capabilities = (asked.capability,) if asked.capability else CAPABILITIES
    if asked.compile:
        compile_all(operations, capabilities)
        return 0
    missed = 0
    for text, holds in report(operations, capabilities):
        print(text if holds else f"{text}  MISSED", flush=True)
        missed += not holds
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
