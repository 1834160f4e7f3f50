"""Power iteration against singular values, and attention with low-rank factors against attention with their product, which is never
formed."""

from typing import Any

import numpy as np
import pytest
import torch
from tolerances import FLOAT32_ATTENTION
from torch.utils._python_dispatch import TorchDispatchMode

from calib.kernels.low_rank.reference import NARROW, low_rank_mix, low_rank_scores, power_iteration

pytestmark = pytest.mark.arithmetic

# Tokens and channels. Power iteration multiplies by R^T R if there are more tokens than channels, and few channels; else it
# multiplies by R and by R^T.
SHAPES = [(300, 64), (64, 64), (20, 64), (300, 200), (7, 200), (400, NARROW), (400, NARROW + 1)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decaying(tokens: int, width: int, rank: int, seed: int = 0) -> torch.Tensor:
    """A matrix `[2, 3, tokens, width]` of that rank; each singular value is 2/3 of the one before."""
    left, right = (
        torch.linalg.qr(randn(2, 3, size, rank, seed=seed + at)).Q for at, size in enumerate((tokens, width))
    )
    return left * (2 / 3) ** torch.arange(rank) @ right.mT


def orthonormal(basis: torch.Tensor) -> bool:
    basis = basis.double()
    return bool((basis.mT @ basis - torch.eye(basis.shape[-1]).double()).abs().max() < 1e-5)


def missed(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of R - R B B^T for every matrix R = x and basis B."""
    x, basis = x.double(), basis.double()
    return torch.linalg.matrix_norm(x - x @ basis @ basis.mT)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("loops", [1, 3, 12])
def test_power_iteration_is_its_equation(tokens, width, loops):
    """The projection of R on the basis is that of the same number of rounds in float64 (numpy)."""
    x, start = decaying(tokens, width, min(tokens, width)), randn(2, 3, width, 4, seed=5)
    before = x.clone(), start.clone()
    basis = power_iteration(x, start, loops)
    assert torch.equal(x, before[0]) and torch.equal(start, before[1])
    assert basis.shape == (2, 3, width, 4) and basis.dtype == torch.float32 and orthonormal(basis)
    matrix, expected = x.double().numpy(), start.double().numpy()
    for _ in range(loops):
        expected = np.linalg.qr(matrix.mT @ (matrix @ expected))[0]
    found = basis.double().numpy()
    # The projections of R are compared, since basis vectors that are orthogonal to all rows of R are arbitrary.
    kept, wanted = (matrix @ b @ b.mT for b in (found, expected))
    assert abs(kept - wanted).max() < 1e-4 * abs(matrix).max()


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_twelve_rounds_come_near_the_best_there_is(tokens, width, rank):
    for seed in range(3):
        x = randn(2, 3, tokens, width, seed=seed)
        x[..., :2] *= 4
        best = torch.linalg.svdvals(x.double())[..., rank:].square().sum(-1).sqrt()
        errors = [missed(x, power_iteration(x, randn(width, rank, seed=9), loops)) for loops in (1, 12)]
        assert (errors[1] >= best * (1 - 1e-6)).all() and (errors[1] <= 1.05 * best).all()
        assert errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize("tokens", [1, 3, 20, 100])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_residual_of_less_rank_is_kept_whole(tokens, rank):
    """Also for one token, and for bases with more vectors than tokens; the surplus vectors are orthonormal, too."""
    x = decaying(tokens, 32, min(rank, tokens))
    for vectors in (rank, 4, 8):
        basis = power_iteration(x, randn(32, vectors, seed=3).expand(2, 3, -1, -1), 3)
        assert orthonormal(basis)
        assert (missed(x, basis) < 1e-5 * torch.linalg.matrix_norm(x)).all()


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_nothing_has_any_basis(tokens, width):
    basis = power_iteration(torch.zeros(1, 2, tokens, width), randn(1, 2, width, 3), 12)
    assert bool(basis.isfinite().all()) and orthonormal(basis)


def test_no_matrix_depends_on_those_beside_it():
    x, start = randn(1, 4, 300, 64), randn(1, 4, 64, 3, seed=1)
    together = power_iteration(x, start, 3)
    for head in range(4):
        alone = power_iteration(x[:, head : head + 1], start[:, head : head + 1], 3)
        torch.testing.assert_close(alone[0, 0], together[0, head], rtol=0, atol=1e-5)


class Counted(TorchDispatchMode):
    """Counts torch operations."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [20, 300], ids=["thin", "moments"])
def test_a_round_is_its_products_and_a_basis(tokens):
    """A round costs two operations, or three: with the small matrices of a block, additional views would take longer than the
    products."""
    x, start, counts = randn(1, 4, tokens, 64), randn(4, 64, 3, seed=1), []
    for loops in (2, 12):
        with Counted() as counted:
            power_iteration(x, start, loops)
        counts.append(counted.number)
    assert counts[1] - counts[0] == 10 * (3 if tokens == 20 else 2)


# --- attention


def factors(heads: int, tokens: int, channels: int, rank: int, segments: int, shared: bool, dtype: torch.dtype):
    """Basis and coefficients of a tile, and their product `[2, heads, tokens, channels]` in float64."""
    basis = randn(2, heads, rank * channels, segments, seed=1).to(dtype)
    coefficients = randn(2, 1 if shared else heads, rank, tokens, seed=2).to(dtype)
    whole = torch.zeros(2, heads, tokens, channels, dtype=torch.float64)
    for token in range(tokens):
        vectors = basis[..., token // (tokens // segments)].double().unflatten(-1, (rank, channels))
        whole[:, :, token] = (coefficients[..., token].double().unsqueeze(-2) @ vectors)[..., 0, :]
    return basis, coefficients, whole


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            self.most = max(self.most, made.numel() if isinstance(made, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shared", [False, True], ids=["heads", "shared"])
@pytest.mark.parametrize(("tokens", "segments"), [(1, 1), (40, 1), (40, 2), (40, 40), (60, 3)])
@pytest.mark.parametrize("rank", [1, 3])
def test_scores_and_mixtures_are_those_of_the_product(tokens, segments, rank, shared, dtype):
    basis, coefficients, whole = factors(3, tokens, 16, rank, segments, shared, dtype)
    query, weights = randn(2, 3, 5, 16, seed=3), randn(2, 3, 5, tokens, seed=4).softmax(-1)
    before = [part.clone() for part in (basis, coefficients, query, weights)]
    scores, mixed = low_rank_scores(query, basis, coefficients), low_rank_mix(weights, basis, coefficients, 16)
    for found, expected in ((scores, query.double() @ whole.mT), (mixed, weights.double() @ whole)):
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert (found - expected).abs().max() < FLOAT32_ATTENTION * expected.abs().max()
    assert all(torch.equal(*pair) for pair in zip(before, (basis, coefficients, query, weights), strict=True))


@pytest.mark.parametrize("segments", [1, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_product_of_the_factors_is_never_formed(rows, segments):
    tokens, channels, rank = 1024, 64, 2
    basis, coefficients, _ = factors(1, tokens, channels, rank, segments, False, torch.float16)
    query, weights = randn(2, 1, rows, channels), randn(2, 1, rows, tokens)
    bound = 2 * max(rank * tokens, rank * channels * segments, rows * tokens, rows * channels * segments)
    assert 4 * bound <= 2 * tokens * channels  # the product, if formed, would be far above the bound
    for call in (
        lambda: low_rank_scores(query, basis, coefficients),
        lambda: low_rank_mix(weights, basis, coefficients, channels),
    ):
        with Largest() as largest:
            call()
        assert 0 < largest.most <= bound


@pytest.mark.parametrize(("width", "formed"), [(NARROW, True), (NARROW + 1, False)])
def test_the_moments_of_many_channels_are_never_formed(width, formed):
    """Above NARROW channels D, R^T R would cost more than products with R and R^T, and D x D numbers of memory."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                shapes.append(tuple(result.shape[-2:]))
            return result

    shapes: list[tuple[int, ...]] = []
    with Products():
        power_iteration(randn(2, 2 * width, width), randn(2, width, 3), 2)
    assert shapes and ((width, width) in shapes) is formed
