"""Counts the clocks for which one iteration (turn) of a loop keeps a multiprocessor's scheduler busy, by issue and by each pipe.

A scheduler issues one instruction of a warp per clock. A pipe with fewer lanes than a warp takes several clocks. Rates are those of
CUDA's programming guide ("Throughput of Native Arithmetic Instructions": results per clock and multiprocessor, a quarter of them
per scheduler); those of matrix instructions follow from the data sheets' dense float16 rates.
"""

import re
from collections import Counter
from collections.abc import Sequence

from calib.kernels.compiled_loop import name_of, registers_of

# 64 results per clock and multiprocessor: integers, logic, shifts, comparisons, selections, conversions to float16.
INTEGER = {
    "LOP3", "SHF", "IADD3", "VIADD", "LEA", "ISETP", "FSETP", "FSEL", "SEL", "FMNMX", "FMNMX3", "PRMT", "PLOP3", "SGXT", "IMNMX",
    "VIMNMX", "MOV", "F2FP",
}  # fmt: skip
# 128 in float32, but 64 on capability 8.0; 64 products of integers.
FLOAT, PRODUCT = {"FADD", "FMUL", "FFMA"}, {"IMAD"}
# 256 in float16, two per lane.
HALF = {"HADD2", "HMUL2", "HFMA2"}
# 16 exponentials, reciprocals and roots.
SPECIAL = {"MUFU"}
# 128 bytes per clock and multiprocessor between registers and shared memory; shuffles use the same path.
MEMORY = {"LDS", "LDSM", "STS", "LDG", "LDGSTS", "STG", "SHFL"}

# Multiply-adds of a scheduler's tensor core per clock: 312 and 989 TFLOP/s of dense float16; with 8 bits twice as many.
MATRIX = {80: 256, 90: 512}


def busy(lines: Sequence[str], capability: int) -> dict[str, float]:
    """Returns the clocks of one turn of a warp, by issue and by pipe, from a loop's disassembled instructions (SASS)."""
    found = Counter[str]({"issue": len(lines)})
    for line in lines:
        name = name_of(line)
        if name in INTEGER:
            found["integer"] += 2
        elif name in PRODUCT:
            found["float"] += 2
        elif name in FLOAT:
            found["float"] += 2 if capability == 80 else 1
        elif name in HALF:
            found["half"] += 1
        elif name in SPECIAL:
            found["special"] += 8
        elif name in MEMORY:
            found["memory"] += 4 * (_tiles(line) if name == "LDSM" else registers_of(line))
        elif name in ("HMMA", "HGMMA"):
            found["matrix"] += _products(line) // MATRIX[capability]
        elif name in ("IMMA", "IGMMA"):
            found["matrix"] += _products(line) // (2 * MATRIX[capability])
    return dict(found)


def _tiles(line: str) -> int:
    """Returns the number of 8 x 8 matrices that one LDSM loads, one register of 4 bytes each."""
    shape = re.search(r"M\w*88\.(\d)", line)
    return int(shape.group(1)) if shape else 1


def _products(line: str) -> int:
    """Returns one warp's products: HMMA.16816 has 16 x 8 x 16; HGMMA.64x8x16 has 64 x 8 x 16 for four warps; 8 bits: IMMA,
    IGMMA."""
    if shape := re.search(r"[HI]GMMA\.(\d+)x(\d+)x(\d+)", line):
        rows, columns, depth = map(int, shape.groups())
        return rows * columns * depth // 4
    if re.search(r"IMMA\.16832\b", line):
        return 16 * 8 * 32
    return 16 * 8 * (8 if re.search(r"HMMA\.1688\b", line) else 16)
