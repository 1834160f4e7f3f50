"""What the disassembler shows of a compiled kernel: its longest loop, and the registers and shared memory of a program."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoopFigures:
    """The longest loop of a compiled kernel.

    Args:
        lines: its instructions as the disassembler writes them (SASS), in their order.
        registers: of a lane.
        spilled: bytes of a lane that lie in memory for want of registers.
        shared: bytes of shared memory of a program.
    """

    lines: tuple[str, ...]
    registers: int
    spilled: int
    shared: int

    @cached_property
    def instructions(self) -> Counter[str]:
        """How often each stands in the loop, by name."""
        return Counter(name_of(line) for line in self.lines)

    def cost(self, count: int, warps: int) -> float:
        """Instructions that a lane issues for every one of `count` codes or words that all lanes read together."""
        return len(self.lines) * 32 * warps / count

    def matrix_per_128_codes(self, codes: int, warps: int) -> float:
        """Matrix instructions of a warp for every 128 codes."""
        return (self.instructions["HMMA"] + self.instructions["HGMMA"]) * warps * 128 / codes

    @property
    def conversions(self) -> int:
        """Whole numbers turned into floating point ones by an instruction of their own."""
        return sum(self.instructions[name] for name in ("I2F", "I2FP"))

    @property
    def loads(self) -> int:
        """Loads from memory of a warp in a turn, into registers or shared memory."""
        return self.instructions["LDG"] + self.instructions["LDGSTS"]

    @property
    def barriers(self) -> int:
        """How often the warps of a program meet in a turn."""
        return self.instructions["BAR"]

    def bytes_ahead(self, warps: int) -> int:
        """Bytes under way between two turns: what a program loads into shared memory, at most."""
        return 32 * warps * sum(4 * registers_of(line) for line in self.lines if name_of(line) == "LDGSTS")


def name_of(line: str) -> str:
    """An instruction's name, without a predicate in front of it and without suffixes."""
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0]


def registers_of(line: str) -> int:
    """Registers of 4 bytes that a load fills, by its suffix."""
    return next((bits // 32 for bits in (64, 128) if re.search(rf"\.{bits}\b", line.split("[")[0])), 1)


def loop_figures(kernel: Any) -> LoopFigures:
    """Of a kernel from `ahead_of_time.compiled`. Raises CalledProcessError where a tool of Triton's package cannot read it."""
    listing, used = disassembled(kernel)
    return LoopFigures(longest_loop(listing), used["REG"], used["STACK"] + used["LOCAL"], kernel.metadata.shared)


def disassembled(kernel: Any) -> tuple[str, dict[str, int]]:
    """The listing (SASS) of a kernel from `ahead_of_time.compiled`, and what a lane takes: REG, and bytes of STACK and LOCAL.

    Raises CalledProcessError where a tool of Triton's package cannot read it.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = _output([str(tools / "nvdisasm"), "-c", file.name])
        usage = _output([str(tools / "cuobjdump"), "-res-usage", file.name])
    return listing, {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def longest_loop(listing: str) -> tuple[str, ...]:
    """The instructions between a label and the last jump back to it, of the longest such stretch."""
    code, loops = code_and_loops(listing)
    start, end = max(loops, key=lambda ends: ends[1] - ends[0], default=(0, -1))
    return tuple(code[start : end + 1])


def code_and_loops(listing: str) -> tuple[list[str], list[tuple[int, int]]]:
    """All instructions, and of every jump back the first and the last that it repeats."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"^\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction.group(1).strip())
    jumps = ((re.search(r"BRA\S*\s.*?(\.L_\w+)", line), at) for at, line in enumerate(code))
    loops = [(labels[jump.group(1)], at) for jump, at in jumps if jump and labels.get(jump.group(1), at + 1) < at]
    return code, loops


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
