"""The rate-distortion bound against its definition solved another way, closed forms, and codes that cannot beat it."""

import math

import numpy as np
import pytest
import torch

from calib.evaluate.rate_distortion import decibels, least_bits, least_error, spectrum

pytestmark = pytest.mark.arithmetic

# Both sides are sums of at most 100 float64 terms, and logarithms and powers of them.
ROUNDED = 1e-12


def random_variances(seed: int, n: int = 40) -> torch.Tensor:
    """Return variances spread over eight powers of ten."""
    return torch.from_numpy(10.0 ** np.random.default_rng(seed).uniform(-5, 3, n))


def by_bisection(variances: np.ndarray, bits: float) -> float:
    """Return the mean error at the water level that spends `bits`, found by bisection of its logarithm."""
    low, high = -2000.0, math.log2(variances.max())
    for _ in range(200):
        middle = (low + high) / 2
        spent = np.maximum(0, np.log2(variances) - middle).sum() / 2 / len(variances)
        low, high = (middle, high) if spent > bits else (low, middle)
    return float(np.minimum(2.0**low, variances).mean())


@pytest.mark.parametrize("bits", [0.0, 1e-6, 0.01, 0.3, 1.0, 2.0, 4.0, 9.0, 16.0, 40.0, 400.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_that_of_its_water_level(bits, seed):
    variances = random_variances(seed)
    assert least_error(variances, bits) == pytest.approx(by_bisection(variances.numpy(), bits), rel=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.999, 0.5, 0.1, 1e-3, 1e-6, 1e-12, 1e-100, 1e-250])
@pytest.mark.parametrize("seed", range(4))
def test_the_rate_is_the_inverse(share, seed):
    variances = random_variances(seed)
    error = share * float(variances.mean())
    bits = least_bits(variances, error)
    assert least_error(variances, bits) == pytest.approx(error, rel=1e-9)
    assert (bits < ROUNDED) == (share == 1)


def test_two_components_in_closed_form():
    variances = torch.tensor([1.0, 16.0], dtype=torch.float64)
    # Up to 2 bits, 1 a value, the larger one has them all; from there on both share.
    for bits in (0.0, 0.25, 0.5, 0.99, 1.0):
        assert least_error(variances, bits) == pytest.approx((1 + 16 * 4.0 ** (-2 * bits)) / 2, rel=ROUNDED)
    for bits in (1.0, 1.5, 3.0, 8.0):
        assert least_error(variances, bits) == pytest.approx(4 * 4.0**-bits, rel=ROUNDED)
    assert least_bits(variances, 1.0) == pytest.approx(1.0, rel=ROUNDED)
    assert least_bits(variances, 4.5) == pytest.approx(math.log2(16 / 8) / 4, rel=ROUNDED)
    assert least_bits(variances, 0.25) == pytest.approx(2.0, rel=ROUNDED)


@pytest.mark.parametrize("bits", [0.0, 0.5, 3.0, 16.0, 500.0])
def test_equal_components_lose_six_decibels_a_bit(bits):
    variances = torch.full((96,), 2.5, dtype=torch.float64)
    assert least_error(variances, bits) == pytest.approx(2.5 * 4.0**-bits, rel=ROUNDED)
    assert least_bits(variances, 2.5 * 4.0**-bits) == pytest.approx(bits, abs=ROUNDED)


def test_components_without_variance_leave_their_bits_to_the_others():
    alive = random_variances(1)
    half = torch.cat([torch.zeros(40, dtype=torch.float64), alive])
    for bits in (0.0, 0.2, 2.0, 20.0):
        assert least_error(half, bits) == pytest.approx(least_error(alive, 2 * bits) / 2, rel=ROUNDED)
        assert least_bits(half, least_error(alive, 2 * bits) / 2) == pytest.approx(bits, abs=1e-9)
    nothing = torch.zeros(5, dtype=torch.float64)
    assert least_error(nothing, 0.0) == least_error(nothing, 3.0) == 0.0
    assert least_bits(nothing, 0.0) == least_bits(nothing, 1.0) == 0.0


def test_the_ends():
    variances = random_variances(2)
    assert least_error(variances, 0.0) == pytest.approx(float(variances.mean()), rel=ROUNDED)
    assert least_error(variances, 5000.0) == least_error(variances, math.inf) == 0.0
    assert least_bits(variances, 0.0) == math.inf
    assert least_bits(variances, math.inf) == least_bits(variances, 2 * float(variances.mean())) == 0.0
    assert 500 < least_bits(variances, 5e-324) < 600


def test_the_order_of_components_does_not_matter():
    variances = random_variances(3)
    assert least_error(variances.flip(0), 1.3) == least_error(variances, 1.3)
    assert least_bits(variances.flip(0), 1.3) == least_bits(variances, 1.3)


def test_no_other_division_of_the_bits_is_better():
    draw = np.random.default_rng(5)
    for seed in range(3):
        variances = random_variances(seed, n=6)
        bound = least_error(variances, 2.0)
        for _ in range(300):
            bits = draw.dirichlet(np.full(6, 0.7)) * 12
            assert float((variances.numpy() * 4.0**-bits).mean()) >= bound * (1 - ROUNDED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: least_error(v, -0.1), "rate must be at least 0 bits per value, got -0.1"),
        (lambda v: least_error(v, math.nan), "rate must be at least 0"),
        (lambda v: least_bits(v, -1.0), r"mean squared error must be at least 0, got -1\.0"),
        (lambda v: least_error(-v, 1.0), "variances must be at least 0"),
        (lambda v: least_bits(v * math.nan, 1.0), "variances must be at least 0"),
        (lambda v: least_error(v[:0], 1.0), "at least one"),
    ],
)
def test_what_is_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, dtype=torch.float64))


def products(seed: int, heads: int = 3, channels: int = 8, tokens: int = 50) -> torch.Tensor:
    """Return E[x x^T] of correlated vectors, float64 `[heads, channels, channels]`."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, tokens, channels, generator=draw, dtype=torch.float64)
    x = x @ torch.randn(heads, channels, channels, generator=draw, dtype=torch.float64)
    return x.mT @ x / tokens


def test_the_components_of_all_heads():
    covariance = products(1)
    expected = np.sort(np.concatenate([np.linalg.svd(own.numpy())[1] for own in covariance]))[::-1]
    np.testing.assert_allclose(spectrum(covariance), expected, rtol=1e-9)
    assert float(spectrum(covariance).sum()) == pytest.approx(
        float(covariance.diagonal(dim1=1, dim2=2).sum()), rel=1e-9
    )


def test_weighted_components_are_eigenvalues_of_the_product():
    covariance, weight = products(1), products(2)
    expected = [np.linalg.eigvals((w @ c).numpy()).real for w, c in zip(weight, covariance, strict=True)]
    np.testing.assert_allclose(spectrum(covariance, weight), np.sort(np.concatenate(expected))[::-1], rtol=1e-9)
    plain = torch.eye(8, dtype=torch.float64).expand(3, -1, -1)
    np.testing.assert_allclose(spectrum(covariance, 2 * plain), 2 * spectrum(covariance), rtol=1e-9)


def test_a_direction_without_variance_or_weight_is_nothing():
    covariance = products(3, heads=1, channels=8, tokens=5)  # of rank 5
    assert (spectrum(covariance) > 0).tolist() == [True] * 5 + [False] * 3
    full, weight = products(4, heads=1), products(5, heads=1, tokens=3)
    assert int((spectrum(full, weight) > 0).sum()) == 3
    assert not spectrum(torch.zeros(2, 4, 4)).any()


@pytest.mark.parametrize("step", [0.2, 0.02])
def test_uniform_quantisation_with_entropy_coding_comes_within_a_quarter_of_a_bit(step):
    """pi e / 6 = 1.53 dB, 0.254 bits, at high rates (Gish and Pierce 1968): of real samples, by their real entropy."""
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    x = torch.randn(200_000, 6, generator=draw, dtype=torch.float64) @ mixing
    covariance = x.T @ x / len(x)
    y = x @ torch.linalg.eigh(covariance).eigenvectors
    codes, size = (y / step).round(), float(covariance.diagonal().mean())
    counts = [column.unique(return_counts=True)[1].double() / len(y) for column in codes.T]
    bits = -sum(float((p * p.log2()).sum()) for p in counts) / 6
    error = float((y - codes * step).square().mean())
    variances = spectrum(covariance[None])
    distance = decibels(error / size) - decibels(least_error(variances, bits) / size)
    assert distance == pytest.approx(decibels(math.pi * math.e / 6), abs=0.05)
    assert bits - least_bits(variances, error) == pytest.approx(math.log2(math.pi * math.e / 6) / 2, abs=0.01)
