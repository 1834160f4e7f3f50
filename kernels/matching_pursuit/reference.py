"""Matching pursuit in plain torch (Mallat and Zhang 1993; CSR, arXiv:2412.11741), and orthogonal matching pursuit.

The residual R starts as x; every step chooses the atom with the largest |R . d|, records the pair (index, R . d) and subtracts
R . d times the atom. Atoms are rows `[N, d]` of about unit length. README.md compares the costs of the two forms of a step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.huge_pages import empty_large

# Correlations in memory at once: on a CPU those that fit a core's cache (1 MiB), elsewhere enough to fill the device.
TILE_ELEMENTS = {"cpu": 2**18}
DEVICE_TILE_ELEMENTS = 2**26

# Length of the runs whose maxima are computed first: argmax is fast in short rows and slow in long ones.
RUN = 64

# Elements of the bases `[vectors, s, d]` of an orthogonal pursuit in memory at once.
BASES_ELEMENTS = 2**21

# The largest Gram matrix, 256 MiB; and the cost of updating (or writing) an entry, in multiply-adds of a matrix product. The cost
# is set above the measured one (below 17.5, `forms` of benchmarks/pursuit_cpu.py), since new products carry no rounding errors of
# the steps before.
GRAM_ELEMENTS = 2**26
UPDATE_COST = 36

# An atom whose part outside the span of the others is shorter than this (relative to it) depends on them, up to float16 rounding.
DEPENDENT = 2**-10


def matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """As `operation.matching_pursuit`, for `x [V, d]` and `atoms [N, d]` of one dtype, which the coefficients have too."""
    if gram_is_cheaper(len(x), len(atoms), atoms.shape[-1], sparsity):
        return pursuit_by_gram(x, atoms, sparsity)
    return pursuit_by_products(x, atoms, sparsity)


def gram_is_cheaper(vectors: int, count: int, width: int, sparsity: int) -> bool:
    """Whether `pursuit_by_gram` costs less than `pursuit_by_products`: a step updates N correlations per vector instead of
    computing N products of length d, but first the N x N Gram matrix has to be computed."""
    saved = (sparsity - 1) * vectors * (width - UPDATE_COST)
    return count * count <= GRAM_ELEMENTS and count * (width + UPDATE_COST) < saved


@torch.no_grad()
def pursuit_by_gram(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Matching pursuit that updates correlations by the Gram matrix: R' . d_j = R . d_j - (R . d_i) (d_i . d_j). The residual R is
    kept as well, for exact decisions and coefficients."""
    gram = torch.mm(atoms, atoms.mT, out=empty_large(len(atoms), len(atoms), like=atoms))
    residual, (index, coefficient) = x.clone(), no_pairs(x, sparsity)
    rows = tile_rows(x, len(atoms))
    for vectors, chosen, found in zip(residual.split(rows), index.split(rows), coefficient.split(rows), strict=True):
        correlations = vectors @ atoms.mT
        for step in range(sparsity):
            chosen[:, step] = decided(vectors, atoms, strongest_two(correlations))
            part = correlations.gather(-1, chosen[:, step, None])
            found[:, step] = taken_away(vectors, atoms, chosen[:, step])
            if step + 1 < sparsity:
                correlations.addcmul_(gram.index_select(0, chosen[:, step]), part, value=-1)
    return index, coefficient


@torch.no_grad()
def pursuit_by_products(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Matching pursuit that multiplies the residual with all atoms in every step."""
    residual, (index, coefficient) = x.clone(), no_pairs(x, sparsity)
    for step in range(sparsity):
        index[:, step] = strongest_atoms(residual, atoms)
        coefficient[:, step] = taken_away(residual, atoms, index[:, step])
    return index, coefficient


def taken_away(residual: Tensor, atoms: Tensor, index: Tensor) -> Tensor:
    """Returns R . d of one atom `index [V]` for every `residual [V, d]`, and subtracts that multiple of the atom from it, in place.

    Products are summed vector by vector: the rounding of a matrix product depends on the number of vectors, and a token's
    coefficients must not.
    """
    chosen = atoms.index_select(0, index)
    part = (residual * chosen).sum(-1)
    residual.addcmul_(chosen, part[:, None], value=-1)
    return part


@torch.no_grad()
def orthogonal_matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Orthogonal matching pursuit (Pati et al. 1993): as `matching_pursuit`, but after every step all coefficients so far are
    refitted by least squares.

    An atom in the span of earlier ones (a repeated one, a zero one) gets the coefficient 0.
    """
    pairs = no_pairs(x, sparsity)
    rows = max(1, BASES_ELEMENTS // (sparsity * x.shape[-1]))
    for vectors, *kept in zip(*(part.split(rows) for part in (x, *pairs)), strict=True):
        for part, found in zip(kept, pursuit_by_bases(vectors, atoms, sparsity), strict=True):
            part.copy_(found)
    return pairs


def pursuit_by_bases(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Orthogonal matching pursuit by Gram-Schmidt: the chosen atoms are T Q with Q orthonormal `[V, s, d]` and T lower triangular,
    so that x^ = (x Q^T) Q = c T Q and c = x Q^T T^-1."""
    vectors, width = x.shape
    index = x.new_empty(vectors, sparsity, dtype=torch.int64)
    bases, parts = x.new_zeros(vectors, sparsity, width), x.new_zeros(vectors, sparsity)
    triangle = torch.eye(sparsity, dtype=x.dtype, device=x.device).repeat(vectors, 1, 1)
    residual = x.clone()
    for step in range(sparsity):
        index[:, step] = strongest_atoms(residual, atoms)
        chosen = atoms.index_select(0, index[:, step])
        before = bases[:, :step]
        # Gram-Schmidt twice: the second pass removes the rounding errors of the first.
        inside = (before @ chosen[..., None])[..., 0]
        rest = chosen - (inside[:, None] @ before)[:, 0]
        again = (before @ rest[..., None])[..., 0]
        rest = rest - (again[:, None] @ before)[:, 0]
        length = torch.linalg.vector_norm(rest, dim=-1)
        new = length > DEPENDENT * torch.linalg.vector_norm(chosen, dim=-1)
        length = torch.where(new, length, 1)
        bases[:, step] = rest * (new / length)[:, None]
        triangle[:, step, :step] = inside + again
        triangle[:, step, step] = length
        parts[:, step] = (residual * bases[:, step]).sum(-1)
        residual.addcmul_(bases[:, step], parts[:, step, None], value=-1)
    coefficient = torch.linalg.solve_triangular(triangle.mT, parts[..., None], upper=True)[..., 0]
    return index, coefficient


def strongest_atoms(residual: Tensor, atoms: Tensor) -> Tensor:
    """Index of the atom with the largest |R . d| for every `residual [V, d]`, int64 `[V]`; computed in tiles of vectors."""
    tiles = residual.split(tile_rows(residual, len(atoms)))
    return torch.cat([decided(tile, atoms, strongest_two(tile @ atoms.mT)) for tile in tiles])


def decided(residual: Tensor, atoms: Tensor, two: Tensor) -> Tensor:
    """Of the `two [V, 2]` atoms of each vector, the one with the larger |R . d|, or the lower index if equal: int64 `[V]`.

    The products are computed again vector by vector: the rounding of a matrix product depends on the number of vectors, and the
    choice of a token's atoms must not.
    """
    sizes = torch.stack([(residual * atoms.index_select(0, index)).sum(-1) for index in two.unbind(1)], 1).abs()
    return torch.where(
        sizes[:, 0] == sizes[:, 1], two.amin(1), torch.where(sizes[:, 0] > sizes[:, 1], two[:, 0], two[:, 1])
    )


def strongest_two(correlations: Tensor) -> Tensor:
    """Indices of the largest and the second largest |c| in each row of `correlations [V, N]`, of equal ones the first, int64 `[V,
    2]`; if there is one atom, it twice."""
    # The maximum of every run is computed at memory speed; argmax is used only in short rows.
    count = correlations.shape[1]
    missing = -count % RUN
    sizes = correlations.abs()
    sizes = F.pad(sizes, (0, missing), value=-1.0) if missing else sizes  # padding is never chosen
    runs = sizes.view(-1, RUN)
    largest = sizes.unflatten(-1, (-1, RUN)).amax(-1)
    starts = torch.arange(0, len(runs), largest.shape[1], device=sizes.device)

    def first_of_largest() -> tuple[Tensor, Tensor]:
        run = largest.argmax(-1)
        return run, run * RUN + runs.index_select(0, starts + run).argmax(-1)

    run, best = first_of_largest()
    sizes.scatter_(1, best[:, None], -1.0)
    largest.scatter_(1, run[:, None], runs.index_select(0, starts + run).amax(-1, keepdim=True))
    second = first_of_largest()[1] if count > 1 else best
    return torch.stack([best, second], 1)


def tile_rows(x: Tensor, count: int) -> int:
    """Number of vectors whose correlations with `count` atoms make one tile."""
    return max(1, TILE_ELEMENTS.get(x.device.type, DEVICE_TILE_ELEMENTS) // count)


def no_pairs(x: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Allocates uninitialised index and coefficient for `sparsity` pairs of every vector."""
    shape = (len(x), sparsity)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape)


def desparsify(index: Tensor, coefficient: Tensor, atoms: Tensor) -> Tensor:
    """Decode: sum of coefficients times atoms, `index [..., s]`, `coefficient [..., s]`, `atoms [N, d]` -> float32 `[..., d]`."""
    pairs, weights = (part.reshape(-1, index.shape[-1]) for part in (index, coefficient.float()))
    summed = F.embedding_bag(pairs, atoms.float(), mode="sum", per_sample_weights=weights)
    return summed.view(*index.shape[:-1], atoms.shape[-1])
