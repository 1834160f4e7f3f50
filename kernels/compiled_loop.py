"""Disassemble a compiled Triton kernel: the instructions of its longest loop, or of the whole kernel if it has no loop; registers,
spills and shared memory."""

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
    """Figures of a compiled kernel and of its longest loop, or of the whole kernel if it has no loop.

    Args:
        lines: their instructions as the disassembler writes them (SASS), in order.
        registers: registers per lane.
        spilled: bytes per lane that are spilled to memory.
        shared: bytes of shared memory per program.
    """

    lines: tuple[str, ...]
    registers: int
    spilled: int
    shared: int

    @cached_property
    def instructions(self) -> Counter[str]:
        """Number of occurrences of each instruction in the loop, by its name without suffixes."""
        return Counter(name_of(line) for line in self.lines)

    def cost(self, count: int, warps: int) -> float:
        """Lane instructions per code or word, where all lanes of `warps` warps together read `count` of them in an iteration."""
        return len(self.lines) * 32 * warps / count

    def matrix_per_128_codes(self, codes: int, warps: int) -> float:
        """Matrix instructions (HMMA, HGMMA) issued by all warps per 128 codes."""
        return (self.instructions["HMMA"] + self.instructions["HGMMA"]) * warps * 128 / codes

    @property
    def conversions(self) -> int:
        """Integer to floating point conversions (I2F, I2FP) in the loop."""
        return sum(self.instructions[name] for name in ("I2F", "I2FP"))

    @property
    def loads(self) -> int:
        """Global memory loads of a warp in one iteration, into registers (LDG) or shared memory (LDGSTS)."""
        return self.instructions["LDG"] + self.instructions["LDGSTS"]

    @property
    def barriers(self) -> int:
        """Barriers (BAR) in one iteration."""
        return self.instructions["BAR"]

    def bytes_ahead(self, warps: int) -> int:
        """Upper bound of the bytes in flight between two iterations: those that a program loads into shared memory in one."""
        return 32 * warps * sum(4 * registers_of(line) for line in self.lines if name_of(line) == "LDGSTS")


def name_of(line: str) -> str:
    """Name of a SASS instruction without its predicate and suffixes."""
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0]


def registers_of(line: str) -> int:
    """Number of 4-byte registers that a load fills, from its suffix: 2 for .64, 4 for .128, else 1."""
    return next((bits // 32 for bits in (64, 128) if re.search(rf"\.{bits}\b", line.split("[")[0])), 1)


def loop_figures(kernel: Any) -> LoopFigures:
    """Figures of a kernel from `ahead_of_time.compiled`. Raises CalledProcessError if Triton's tools cannot read it."""
    listing, used = disassembled(kernel)
    return LoopFigures(longest_loop(listing), used["REG"], used["STACK"] + used["LOCAL"], kernel.metadata.shared)


def disassembled(kernel: Any) -> tuple[str, dict[str, int]]:
    """Returns the SASS listing of a kernel from `ahead_of_time.compiled`, and per lane its registers (REG) and bytes (STACK,
    LOCAL).

    Raises CalledProcessError if Triton's tools cannot read it.
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
    """Instructions of the longest loop, from a label to the last backward jump to it; of the whole kernel if it has no loop."""
    code, loops = code_and_loops(listing)
    start, end = max(loops, key=lambda ends: ends[1] - ends[0], default=(0, len(code) - 1))
    return tuple(code[start : end + 1])


def code_and_loops(listing: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns all instructions of a listing, and for every backward jump the indices of the first and the last one it repeats."""
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
