"""Estimates the clocks of one loop iteration of a warp that has a multiprocessor to itself: the latency that other warps must hide.

A warp issues its instructions in order, at most one per clock, and stops at an instruction whose operand is still being loaded.
Only the latencies of loads, from memory and from shared memory, are modelled. Barriers, and arithmetic that takes longer than a
clock, are not, so the estimate is a lower bound.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from calib.kernels.compiled_loop import name_of, registers_of

# Latency of a load in clocks: from memory, without a cache hit or other traffic, 466 on an A100 and 479 on an H100; from shared
# memory 29 (Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv:2402.13499).
MEMORY, SHARED = 480, 29

TURNS = 3  # simulated iterations; after these the loads in flight between iterations no longer change


@dataclass(frozen=True)
class Turn:
    """Clocks of one iteration, and how often the warp stopped for loads from memory in it."""

    clocks: int
    waits: int


def turn_alone(lines: Sequence[str], memory: int = MEMORY, shared: int = SHARED) -> Turn:
    """Simulates a loop given by its SASS instructions; returns the figures of the last iteration. `memory`, `shared`: latencies."""
    clock = waits = 0
    there: dict[int, tuple[int, bool]] = {}  # by register: clock when it is loaded, and whether from memory
    groups: list[int] = []  # per group of asynchronous loads: clock at which all of them are complete
    group = 0
    for _ in range(TURNS):
        begun, before = clock, waits
        for line in lines:
            name, operands = name_of(line), _registers(line)
            arrives, slow = max((there[number] for number in operands if number in there), default=(0, False))
            if name == "DEPBAR" and (left := re.search(r"SB\d+, 0x([0-9a-f]+)", line)):
                done = groups[: len(groups) - int(left.group(1), 16)]
                arrives, slow = max([0, *done]), True
                groups = groups[len(done) :]
            if arrives > clock:
                waits += slow
                clock = arrives
            for number in operands:
                there.pop(number, None)
            if name in ("LDG", "LDS", "LDSM") and operands:
                taken = 4 if name == "LDSM" else registers_of(line)
                when = (clock + memory, True) if name == "LDG" else (clock + shared, False)
                there |= dict.fromkeys(range(operands[0], operands[0] + taken), when)
            elif name == "LDGSTS":
                group = clock + memory
            elif name == "LDGDEPBAR":
                groups.append(group)
                group = 0
            clock += 1
    return Turn(clock - begun, waits - before)


def _registers(line: str) -> list[int]:
    """Numbers of the registers that an instruction names, including the second register of 64-bit pairs."""
    found = []
    for number, pair in re.findall(r"\bR(\d+)(\.64)?", line):
        found += [int(number), int(number) + 1] if pair else [int(number)]
    return found
