"""Kernels compiled and read without a GPU: that they compile for a given one, and what their inner loops are made of.

Triton's package carries the assembler and the disassembler, so a machine without a GPU can tell how many instructions a code
costs, which is what bounds attention over packed tokens (KERNELS in README.md of `kernels/attend`).

    python -m calib.kernels.ahead_of_time attend quantise      # compiles what these operations declare, prints the figures

Not under TRITON_INTERPRET=1, where there is nothing to compile.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from typing import Any

# Compute capabilities that every kernel must compile for: A100 and H100/H200.
CAPABILITIES = (80, 90)

OPERATIONS = (
    "attend",
    "quantise",
    "probe_saliency",
    "matching_pursuit",
    "neural_dict",
    "desparsify_attend",
    "host_gather",
    "put_tokens",
    "top_k",
    "trellis",
)


@dataclass(frozen=True)
class Specialisation:
    """One way to compile a kernel.

    Args:
        kernel: the function under `triton.jit`.
        types: of each argument that is no constant: "*fp16" is a pointer, aligned to 16 bytes, "i32" a number, "i32:16" one that
            16 divides. A launch finds out both by itself.
        constants: the values of the others.
        warps, stages: what the launch asks for.
        codes: codes that an iteration of the longest loop reads, all lanes together; 0: the loop is held to nothing.
        most: instructions that one code may cost; without it they are only counted.
        words: the words that these codes lie in; 0: not counted.
        matrix: matrix instructions of a warp that 128 codes may cost.
        spilled: bytes of a lane that may lie in memory for want of registers.
        beside: specialisations that are declared before: what a "code" or a "word" of this one may cost at most is its cost there.
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
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopFigures:
    """The longest loop of a compiled kernel: instructions by name, and the kernel's registers and spilled bytes a lane."""

    instructions: Counter[str]
    registers: int
    spilled: int

    def cost(self, count: int, warps: int) -> float:
        """Instructions that a lane issues for every one of `count` codes or words that all lanes read together."""
        return self.instructions.total() * 32 * warps / count

    def matrix_per_128_codes(self, codes: int, warps: int) -> float:
        """Matrix instructions of a warp for every 128 codes."""
        return (self.instructions["HMMA"] + self.instructions["HGMMA"]) * warps * 128 / codes

    @property
    def conversions(self) -> int:
        """Whole numbers turned into floating point ones by an instruction of their own."""
        return sum(self.instructions[name] for name in ("I2F", "I2FP"))


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
    source = ASTSource(one.kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": one.warps, "num_stages": one.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def loop_figures(kernel: Any) -> LoopFigures:
    """What the disassembler shows of a compiled kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = _output([str(tools / "nvdisasm"), "-c", file.name])
        usage = _output([str(tools / "cuobjdump"), "-res-usage", file.name])
    names = Counter(re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0] for line in _longest_loop(listing))
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return LoopFigures(names, used["REG"], used["STACK"] + used["LOCAL"])


def _longest_loop(listing: str) -> list[str]:
    """The instructions between a label and the last jump back to it, of the longest such stretch."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"^\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction.group(1).strip())
    jumps = ((re.search(r"BRA\S*\s.*?(\.L_\w+)", line), at) for at, line in enumerate(code))
    loops = [(labels[jump.group(1)], at) for jump, at in jumps if jump and labels.get(jump.group(1), at + 1) < at]
    start, end = max(loops, key=lambda ends: ends[1] - ends[0], default=(0, -1))
    return code[start : end + 1]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def declared(operation: str) -> dict[str, Specialisation]:
    """What an operation's `triton.py` declares to be compiled: `SPECIALISATIONS`, by name."""
    found: dict[str, Specialisation] = import_module(f"calib.kernels.{operation}.triton").SPECIALISATIONS
    return found


def report(operations: Iterable[str]) -> Iterable[tuple[str, bool]]:
    """A line for each specialisation and capability, and whether it holds to its limits."""
    for operation in operations:
        costs: dict[tuple[str, int, str], float] = {}
        for name, one in declared(operation).items():
            for capability in CAPABILITIES:
                figures = loop_figures(compiled(one, capability))
                line = f"{operation:18} {name:34} sm_{capability}"
                line += f"  {figures.registers:3} registers, {figures.spilled:3} spilled bytes"
                good = True
                if one.codes:
                    matrix = figures.matrix_per_128_codes(one.codes, one.warps)
                    good = figures.spilled <= one.spilled and not figures.conversions and matrix <= one.matrix
                    for kind, count, most in (("code", one.codes, one.most), ("word", one.words, inf)):
                        if count:
                            cost = costs[name, capability, kind] = figures.cost(count, one.warps)
                            if kind in one.beside:
                                most = min(most, costs[one.beside[kind], capability, kind])
                            good &= cost <= most
                            line += f", {cost:.2f} instructions a {kind}"
                            line += f" (at most {most:.2f})" if isfinite(most) else ""
                    line += f", {matrix:.2f} matrix instructions per 128 codes, {figures.conversions} conversions"
                yield line, good


if __name__ == "__main__":
    missed = 0
    for text, holds in report(sys.argv[1:] or OPERATIONS):
        print(text if holds else f"{text}  MISSED", flush=True)
        missed += not holds
    sys.exit(1 if missed else 0)
