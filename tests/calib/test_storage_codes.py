"""Codes for storage: each part of a fit against its definition in float64."""

import torch
from toy_layer_sample import SHAPE, sample

from calib.runtime.artifact.tensor_registry import check_registered
from calib.runtime.rotation import Rotation
from calib.statistics.joint_codes import RIDGE, JointCodes, price_of, regression
from calib.statistics.storage_codes import StorageCodes

TURN = Rotation(torch.tensor([0.3, 0.05, 0.007, 0.001], dtype=torch.float64))
WIDTH = 12


def weight_of(draw: torch.Generator, channels: int = WIDTH) -> torch.Tensor:
    root = torch.randn(channels, channels, generator=draw, dtype=torch.float64)
    return (root @ root.T)[None]


def joined(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, a linear function of known vectors plus noise and a mean, and the known vectors."""
    known = torch.randn(900, 20, generator=draw)
    x = known @ torch.randn(20, WIDTH, generator=draw) + 0.4 * torch.randn(900, WIDTH, generator=draw) + 3
    return x, known


def test_a_fit_by_its_formulas():
    draw = torch.Generator().manual_seed(0)
    x, known = joined(draw)
    weight = weight_of(draw)
    found = JointCodes.fitted(x, known, weight, 0.0)
    f, target = known.double(), (x - x.mean(0)).double()
    square = f.T @ f
    matrix = torch.linalg.solve(square + RIDGE * torch.diag(square.diagonal()), f.T @ target)
    torch.testing.assert_close(found.matrix.double(), matrix, rtol=1e-4, atol=1e-5)
    left = x.double() - f @ matrix
    torch.testing.assert_close(found.mean.double(), left.mean(0), rtol=1e-4, atol=1e-4)
    rows, spread = found.rows[0].double(), torch.cov(left.T, correction=0)
    torch.testing.assert_close(rows.T @ rows, weight[0], rtol=1e-3, atol=1e-3 * float(weight.abs().max()))
    components = rows @ spread @ rows.T
    off = components - torch.diag(components.diagonal())
    assert float(off.abs().max()) < 0.02 * float(components.diagonal().max())  # shrinkage turns them a little
    torch.testing.assert_close(found.columns[0].double() @ rows, torch.eye(WIDTH).double(), rtol=0, atol=1e-3)
    y = (left - left.mean(0))[::3] @ rows.T
    torch.testing.assert_close(found.errors[0, :, 0], y.square().mean(0), rtol=1e-3, atol=1e-6)
    assert bool((found.errors[0, :, 0].diff() <= 0).all() and (found.errors.diff(dim=-1) <= 0).all())


def test_a_predictor_without_variance_predicts_nothing():
    """A head of equal keys is decoded to keys that deviate by 1e-20: rounding, which is proportional to other heads' components."""
    draw = torch.Generator().manual_seed(2)
    x, known = joined(draw)
    nothing = 1e-20 * x[:, :2]
    found = regression(x - x.mean(0), torch.cat([known, nothing - nothing.mean(0)], -1), 1)
    assert float(found[-2:].abs().max()) < 1e6  # an artifact may hold 1e18
    torch.testing.assert_close(found[:-2], regression(x - x.mean(0), known, 1), rtol=1e-6, atol=1e-7)


def test_widths_are_worth_their_bits_and_more_of_them_err_less():
    draw = torch.Generator().manual_seed(1)
    x, known = joined(draw)
    weight, before = weight_of(draw), None
    codes = JointCodes.fitted(x, known, weight, 0.0)
    for bits in (16, 28, 52):
        own = codes.at(price_of([codes], bits))
        assert bits - 12 < own.bits <= bits
        missed = (own.decoded(x, known) + own.mean - x).double()
        error = float((missed @ weight[0] * missed).sum(-1).mean())
        assert before is None or error < 0.6 * before
        before = error
    nothing = codes.at(1e9)
    assert nothing.bits == 0 and torch.equal(nothing.decoded(x, known), known @ codes.matrix)


def eye(_: int = 0) -> torch.Tensor:
    return torch.eye(SHAPE.head_dim, dtype=torch.float64).expand(3, SHAPE.layers, SHAPE.kv_heads, -1, -1)


def test_what_is_sampled_and_what_an_artifact_takes():
    """Tokens of all heads with keys before RoPE, without padding and the first ones; without samples tensors are valid, too."""
    one = sample(tokens=24, padding=(0, 7))
    one.keys[1, :, :7] = one.values[1, :, :7] = 1e9
    statistic = StorageCodes(SHAPE, 0, torch.float32, TURN, eye)
    statistic.observe(one)
    rows = statistic.layers[0].sample()
    half = len(TURN.frequencies)
    angles = one.positions[:, None, :, None] * TURN.frequencies
    first, second, rest = one.keys.double().split([half, half, SHAPE.head_dim - 2 * half], -1)
    before = torch.complex(first, second) * torch.polar(torch.ones_like(angles), -angles)
    before = torch.cat([before.real, before.imag, rest], -1)
    kept = one.mask & (one.positions >= 4)
    expected = torch.cat([x.transpose(1, 2)[kept].flatten(1) for x in (before, one.values.double())], -1)
    assert len(rows) == 24 - 4 + 24 - 7 - 4
    found, expected = (x[x[:, -1].argsort()].double() for x in (rows, expected))  # a sample has an order of its own
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    tensors = statistic.tensors()
    check_registered(tensors, SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim, ())
    width = SHAPE.kv_heads * SHAPE.head_dim
    assert not tensors["keys.storage.matrix"][0].any() and not tensors["values.storage.matrix"][0, : 2 * width].any()
    assert tensors["values.storage.matrix"][0, 2 * width :].any()
