"""Kernels compiled and read without a GPU: that they compile for a given one, and what their inner loops are made of.

Triton's package carries the assembler and the disassembler, so a machine without a GPU can tell how many instructions a code
costs, which is what bounds attention over packed tokens (KERNELS in README.md of `kernels/attend`).

    python -m calib.kernels.ahead_of_time attend quantise              # compiles what these operations declare, prints the figures
    python -m calib.kernels.ahead_of_time --compile --capability 90    # all for one GPU, held to nothing

Not under TRITON_INTERPRET=1, where there is nothing to compile.
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

# On the last one programs of four and more warps have other matrix instructions, which wait in loops, and what fills the registers
# fills them otherwise: such kernels are compiled for it and printed, and held to nothing there.
NEWEST = 100

MOST_PROCESSES = 8  # that compile at the same time; each takes about a gigabyte

# What differs by less is the compiler's order of instructions.
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
    """One way to compile a kernel.

    Args:
        kernel: the function under `triton.jit`.
        types: of each argument that is no constant: "*fp16" is a pointer, aligned to 16 bytes, "i32" a number, "i32:16" one that
            16 divides. A launch finds out both by itself.
        constants: the values of the others; EARLY, where it is one, is what the capability says (`early_launch.py`).
        warps, stages: what the launch asks for.
        codes: codes that an iteration of the longest loop reads, all lanes together; 0: the loop is held to nothing.
        most: instructions that one code may cost; without it they are only counted.
        words: the words that these codes lie in; 0: not counted.
        matrix: matrix instructions of a warp that 128 codes may cost.
        spilled: bytes of a lane that may lie in memory for want of registers.
        programs: programs that one multiprocessor must have room for at once.
        barriers: how often the warps of a program may meet in a turn of that loop.
        waits: how often a warp may stop for a load from memory in a turn.
        beside: specialisations that are declared before: a "code" or a "word" of this one may cost `MOST_BESIDE` of its cost there.
        stages_before_hopper: what the launch asks for there; as many where it is not said.
        fusion: whether a product may be joined to a sum, as the launch says.
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
    """The kernel for GPUs of this capability, from Triton's own compiler."""
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
    """What an operation's `triton.py` declares to be compiled: `SPECIALISATIONS`, by name."""
    found: dict[str, Specialisation] = import_module(f"calib.kernels.{operation}.triton").SPECIALISATIONS
    return found


def report(operations: Iterable[str], capabilities: Iterable[int] = CAPABILITIES) -> Iterable[tuple[str, bool]]:
    """A line for each specialisation and capability, and whether it holds to its limits."""
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
    """Compiles, a process a core, and holds nothing to limits: with releases of Triton whose instructions these were not written
    for."""
    asked = [(*one, capability) for one in names(operations) for capability in capabilities]
    with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), get_context("spawn")) as processes:
        for line in processes.map(compiled_line, *zip(*asked, strict=True)):
            print(line, flush=True)


def names(operations: Iterable[str]) -> list[tuple[str, str]]:
    """Every operation with the name of each of its specialisations."""
    return [(operation, name) for operation in operations for name in declared(operation)]


def compiled_line(operation: str, name: str, capability: int) -> str:
    """Compiles one; what is printed of it."""
    compiled(declared(operation)[name], capability)
    return f"{operation:18} {name} sm_{capability}"


def main() -> int:
    """Prints what every kernel takes; 1 where one misses its limits."""
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
