"""Vectors as a few atoms of a dictionary, found greedily (matching pursuit, Mallat and Zhang 1993; CSR, arXiv:2412.11741).

R starts as x; every step takes the atom of the largest |R . d|, writes down (index, R . d) and subtracts R . d times the
atom. Atoms are rows `[N, d]` of about unit length. The README has the two forms of the step, and what they cost.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.huge_pages import empty_large

# Correlations in memory at once: on a CPU what stays in the cache of a core (1 MiB), elsewhere what fills the device.
TILE_ELEMENTS = {"cpu": 2**18}
DEVICE_TILE_ELEMENTS = 2**26

# Neighbours of which first the largest is taken: a position in a short row is cheap, in a long one it is a slow loop.
RUN = 64

# Vectors of an orthogonal pursuit at once: their bases are `[vectors, s, d]`.
BASES_ELEMENTS = 2**21

# The largest Gram matrix, 256 MiB; and, in multiply-adds of a matrix product, what an entry moved counts: a row's taken from the
# matrix, scaled and subtracted, or one of a new matrix written. Above what a CPU measures (below 17.5, `forms` of
# benchmarks/pursuit_cpu.py), since products made anew carry no rounding of the steps before.
GRAM_ELEMENTS = 2**26
UPDATE_COST = 36

# What is left of an atom outside the span of others below this is the rounding of its float16 entries.
DEPENDENT = 2**-10


def matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """`sparsity` pairs for every vector: `x [V, d]`, `atoms [N, d]` of one dtype -> index int64, coefficient in it, `[V, s]`.

    Index: the first of the largest |R . d|; coefficient: R . d, signed. A repeated atom's coefficients add up.
    """
    if gram_is_cheaper(len(x), len(atoms), atoms.shape[-1], sparsity):
        return pursuit_by_gram(x, atoms, sparsity)
    return pursuit_by_products(x, atoms, sparsity)


def gram_is_cheaper(vectors: int, count: int, width: int, sparsity: int) -> bool:
    """A step is an update of N correlations for each vector, or N products of d; the matrix is N N entries first."""
    saved = (sparsity - 1) * vectors * (width - UPDATE_COST)
    return count * count <= GRAM_ELEMENTS and count * (width + UPDATE_COST) < saved


@torch.no_grad()
def pursuit_by_gram(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Correlations kept up to date: R' . d_j = R . d_j - (R . d_i) (d_i . d_j). R is kept for decisions and coefficients."""
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
    """The residual kept, and multiplied with all atoms at every step."""
    residual, (index, coefficient) = x.clone(), no_pairs(x, sparsity)
    for step in range(sparsity):
        index[:, step] = strongest_atoms(residual, atoms)
        coefficient[:, step] = taken_away(residual, atoms, index[:, step])
    return index, coefficient


def taken_away(residual: Tensor, atoms: Tensor, index: Tensor) -> Tensor:
    """R . d of one atom `index [V]` for every `residual [V, d]`, which is left without it.

    Summed vector by vector: how a matrix product rounds depends on how many vectors it has, and a token's coefficients must
    not.
    """
    chosen = atoms.index_select(0, index)
    part = (residual * chosen).sum(-1)
    residual.addcmul_(chosen, part[:, None], value=-1)
    return part


@torch.no_grad()
def orthogonal_matching_pursuit(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """As `matching_pursuit`, with all coefficients so far refitted by least squares after every step (Pati et al. 1993).

    An atom that those before it already span (a repeated one, a zero one) gets the coefficient 0.
    """
    pairs = no_pairs(x, sparsity)
    rows = max(1, BASES_ELEMENTS // (sparsity * x.shape[-1]))
    for vectors, *kept in zip(*(part.split(rows) for part in (x, *pairs)), strict=True):
        for part, found in zip(kept, pursuit_by_bases(vectors, atoms, sparsity), strict=True):
            part.copy_(found)
    return pairs


def pursuit_by_bases(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Atoms chosen so far are T Q, Q orthonormal `[V, s, d]`, T lower triangular: x^ = (x Q^T) Q = c T Q, c = x Q^T T^-1."""
    vectors, width = x.shape
    index = x.new_empty(vectors, sparsity, dtype=torch.int64)
    bases, parts = x.new_zeros(vectors, sparsity, width), x.new_zeros(vectors, sparsity)
    triangle = torch.eye(sparsity, dtype=x.dtype, device=x.device).repeat(vectors, 1, 1)
    residual = x.clone()
    for step in range(sparsity):
        index[:, step] = strongest_atoms(residual, atoms)
        chosen = atoms.index_select(0, index[:, step])
        before = bases[:, :step]
        # Gram-Schmidt twice: the second pass removes what the rounding of the first left.
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
    """The atom of the largest |R . d| for every `residual [V, d]`, a tile of correlations at a time: int64 `[V]`."""
    tiles = residual.split(tile_rows(residual, len(atoms)))
    return torch.cat([decided(tile, atoms, strongest_two(tile @ atoms.mT)) for tile in tiles])


def decided(residual: Tensor, atoms: Tensor, two: Tensor) -> Tensor:
    """Of `two [V, 2]` atoms the one of the larger |R . d|, the lower index of equals: int64 `[V]`.

    The products are made anew, vector by vector: how a matrix product rounds depends on how many vectors it has, and a token's
    atoms must not.
    """
    sizes = torch.stack([(residual * atoms.index_select(0, index)).sum(-1) for index in two.unbind(1)], 1).abs()
    return torch.where(
        sizes[:, 0] == sizes[:, 1], two.amin(1), torch.where(sizes[:, 0] > sizes[:, 1], two[:, 0], two[:, 1])
    )


def strongest_two(correlations: Tensor) -> Tensor:
    """The first of the largest |c| in each row of `correlations [V, N]` and the first of the others, int64 `[V, 2]`; of a
    single atom, that one twice."""
    # The largest of every run is found at memory speed, the first position of one only in short rows.
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
    """Vectors whose correlations with `count` atoms make one tile."""
    return max(1, TILE_ELEMENTS.get(x.device.type, DEVICE_TILE_ELEMENTS) // count)


def no_pairs(x: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Room for `sparsity` pairs of every vector."""
    shape = (len(x), sparsity)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape)


def desparsify(index: Tensor, coefficient: Tensor, atoms: Tensor) -> Tensor:
    """The sum of coefficient times atom: `[..., s]`, `[..., s]`, `[N, d]` -> float32 `[..., d]`."""
    pairs, weights = (part.reshape(-1, index.shape[-1]) for part in (index, coefficient.float()))
    summed = F.embedding_bag(pairs, atoms.float(), mode="sum", per_sample_weights=weights)
    return summed.view(*index.shape[:-1], atoms.shape[-1])
