"""How long one warp takes for a turn of a loop when it has a multiprocessor to itself: what has to be hidden by other warps.

A warp issues its instructions in their order, at most one a clock, and stops where one needs what an earlier one has not brought
yet. Counted are loads alone: those from memory and from shared memory. What arithmetic takes longer than a clock, and barriers of
several warps, are not, so that a turn takes at least this.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from calib.kernels.compiled_loop import name_of, registers_of

# Clocks until a load is there, where no cache has it and nothing else is under way: 466 on an A100 and 479 on an H100, and 29 from
# shared memory (Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv:2402.13499).
MEMORY, SHARED = 480, 29

TURNS = 3  # until what is under way from one turn to the next is what it stays


@dataclass(frozen=True)
class Turn:
    """Clocks of a turn, and how often the warp stopped for loads from memory."""

    clocks: int
    waits: int


def turn_alone(lines: Sequence[str], memory: int = MEMORY, shared: int = SHARED) -> Turn:
    """Of a loop's instructions as the disassembler writes them (SASS)."""
    clock = waits = 0
    there: dict[int, tuple[int, bool]] = {}  # by register: when it is loaded, and whether from memory
    groups: list[int] = []  # of asynchronous loads: when all of one are there
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
    """Those that an instruction names, and the second ones of pairs."""
    found = []
    for number, pair in re.findall(r"\bR(\d+)(\.64)?", line):
        found += [int(number), int(number) + 1] if pair else [int(number)]
    return found
