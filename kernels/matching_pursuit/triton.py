"""Matching pursuit on a GPU: all steps in one kernel; a program keeps a tile of residuals and reads the dictionary tile by tile.

Correlations only decide which atom is chosen. They are computed by float16 matrix products with nearly float32 precision: a number
is split into high + low, each of 11 bits, and R . d is the sum of three products of these, in float32 (low . low would be below the
last digit). The product with the chosen atom is computed again in float32. README.md has the error and the costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from calib.kernels.ahead_of_time import Specialisation
from calib.kernels.launch import launch
from calib.kernels.matching_pursuit.reference import no_pairs

# Scales that use the range of float16 for the halves: a row's largest |R| is scaled to 2^14 ... 2^15, atoms are multiplied by 2^12.
RESIDUAL_EXPONENT = tl.constexpr(14)
ATOM_SCALE = tl.constexpr(4096.0)

# Residuals per program, and per warp: large tiles read the dictionary less often, small ones spread few vectors over the device.
ROWS, MANY_ROWS, WARP_ROWS = 64, 128, 16
MANY = 2**13

# Bytes of shared memory of a multiprocessor that suffice for the large tile with three tiles of the dictionary in flight.
ROOMY = 160 * 2**10

WIDEST = 256
SPLIT_ROWS = 16


# Sizes that differ from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["count"])
def split_atoms(
    atoms, high, low, count, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Splits `atoms [N, D]` times `ATOM_SCALE` into `high` + `low`, float16 `[N rounded up to tiles, BD]`, zeros beyond N and D.
    EXACT: only `high`."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BD)
    inside = (row < count)[:, None] & (column < D)[None, :]
    scaled = tl.load(atoms + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32) * ATOM_SCALE
    half = scaled.to(tl.float16)
    position = row[:, None] * BD + column[None, :]
    tl.store(high + position, half)
    if not EXACT:
        tl.store(low + position, (scaled - half.to(tl.float32)).to(tl.float16))


@triton.jit(do_not_specialize=["vectors", "count", "tiles", "sparsity"])
def pursue(
    x, atoms, high, low, index, coefficient, vectors, count, tiles, sparsity,
    D: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Matching pursuit of a tile of `x [V, D]` float32 with `atoms [N, D]`, also given split as `high` and `low`; stores pairs `[V,
    s]`."""
    row = tl.program_id(0).to(tl.int64) * BV + tl.arange(0, BV)
    channel = tl.arange(0, BD)
    column = tl.arange(0, BN)
    valid = row < vectors
    used = (channel < D)[None, :]
    residual = tl.load(x + row[:, None] * D + channel[None, :], mask=valid[:, None] & used, other=0.0)
    for step in range(sparsity):
        r_high, r_low = split_residual(residual)
        best = tl.full([BV, BN], -1.0, tl.float32)
        at = tl.zeros([BV, BN], tl.int32)
        for tile in range(tiles):
            position = (tile * BN + column)[None, :] * BD + channel[:, None]
            d_high = tl.load(high + position)
            # Small products first: added to a large sum they would lose digits.
            products = tl.dot(r_low, d_high)
            if not EXACT:
                products = tl.dot(r_high, tl.load(low + position), products)
            products = tl.dot(r_high, d_high, products)
            # Every lane keeps its own first maximum, so that one reduction per step suffices, not one per tile.
            better = tl.abs(products) > best
            best = tl.where(better, tl.abs(products), best)
            at = tl.where(better, tile, at)
        largest = tl.max(best, 1)
        first = tl.min(tl.where(best == largest[:, None], at * BN + column[None, :], count), 1)
        # Padding rows of zeros behind N are never larger than an atom; they could win only if all products are NaN.
        chosen = tl.minimum(first, count - 1)
        atom = tl.load(atoms + chosen[:, None] * D + channel[None, :], mask=used, other=0.0).to(tl.float32)
        part = tl.sum(residual * atom, 1)
        residual -= part[:, None] * atom
        tl.store(index + row * sparsity + step, chosen.to(tl.int64), mask=valid)
        tl.store(coefficient + row * sparsity + step, part, mask=valid)


@triton.jit
def split_residual(residual):
    """Scales every row by a power of two so that its largest |R| is 2^14 ... 2^15, and split it into a sum of two float16."""
    exponent = tl.max(tl.abs(residual), 1).to(tl.int32, bitcast=True) >> 23
    # The bits of 2^(RESIDUAL_EXPONENT - e), e = exponent - 127; limited to the range of float32 for the smallest rows.
    bits = (-tl.maximum(exponent, RESIDUAL_EXPONENT) + (254 + RESIDUAL_EXPONENT)) << 23
    scale = bits.to(tl.float32, bitcast=True)
    scaled = residual * scale[:, None]
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float32)).to(tl.float16)


def supports(x: Tensor, atoms: Tensor, sparsity: int) -> bool:
    """Whether the kernel supports these: float32 vectors of at most 256 channels; float32 or float16 atoms with 32-bit offsets."""
    supported = x.dtype == torch.float32 and atoms.dtype in (torch.float32, torch.float16)
    return supported and 0 < x.shape[-1] <= WIDEST and 0 < len(atoms) <= 2**31 // (2 * WIDEST) and sparsity > 0


@torch.no_grad()
def matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """As `operation.matching_pursuit`: `x [V, d]`, `atoms [N, d]` -> index int64, coefficient float32 `[V, s]`.

    Entries of atoms must be below 16 in magnitude. Float16 atoms, whose low halves are 0, need two products instead of three.
    """
    (vectors, width), count = x.shape, len(atoms)
    index, coefficient = no_pairs(x, sparsity)
    if not vectors:
        return index, coefficient
    x, atoms = x.contiguous(), atoms.contiguous()
    exact = atoms.dtype == torch.float16
    tile = tile_of(vectors, width, room(x.device))
    tiles = triton.cdiv(count, tile["BN"])
    halves = atoms.new_empty(1 if exact else 2, tiles * tile["BN"], tile["BD"], dtype=torch.float16)
    high, low = halves[0], halves[-1]
    splits = (tiles * tile["BN"] // SPLIT_ROWS,)
    launch(split_atoms, splits, atoms, high, low, count, D=width, BD=tile["BD"], BN=SPLIT_ROWS, EXACT=exact)
    launch(
        pursue, (triton.cdiv(vectors, tile["BV"]),),
        x, atoms, high, low, index, coefficient, vectors, count, tiles, sparsity, D=width, EXACT=exact, **tile
    )  # fmt: skip
    return index, coefficient


def tile_of(vectors: int, width: int, shared: int) -> dict[str, int]:
    """Launch options: vectors (BV), atoms (BN) and channels (BD) of a tile, warps, and stages (tiles of the dictionary in
    flight)."""
    channels = max(16, triton.next_power_of_2(width))
    roomy = shared >= ROOMY
    rows = MANY_ROWS if vectors > MANY and roomy else ROWS
    # With 256 channels the halves of residuals fill the registers, so that tiles have half as many atoms.
    columns, stages = (32, 2) if channels == WIDEST else (64, 3 if roomy else 2)
    return {"BV": rows, "BN": columns, "BD": channels, "num_warps": rows // WARP_ROWS, "num_stages": stages}


def room(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor; `ROOMY` for other devices than GPUs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else ROOMY


TYPES = dict.fromkeys(("x", "atoms", "coefficient"), "*fp32") | {"high": "*fp16", "low": "*fp16", "index": "*i64"}
TYPES |= dict.fromkeys(("vectors", "count", "tiles", "sparsity"), "i32")


def specialised(vectors: int, width: int, exact: bool = False) -> Specialisation:
    """Specialisation that a launch of these sizes compiles."""
    constants = {"D": width, "EXACT": exact} | tile_of(vectors, width, ROOMY)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    return Specialisation(pursue, TYPES | {"atoms": "*fp16" if exact else "*fp32"}, constants, warps, stages)


SPECIALISATIONS = {
    "many vectors d=128": specialised(MANY + 1, 128),
    "many vectors d=128 float16 atoms": specialised(MANY + 1, 128, exact=True),
    "few vectors d=80": specialised(1, 80),
    "few vectors d=256": specialised(1, 256),
    "split d=128": Specialisation(split_atoms, TYPES, {"D": 128, "BD": 128, "BN": SPLIT_ROWS, "EXACT": False}),
}
