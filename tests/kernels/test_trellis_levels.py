"""Levels of trellis-coded words, and products with them, in compiled C: levels against plain torch and the definition, products
against float64."""

import os
import shutil

import numpy as np
import pytest
import torch
from trellis_paths import trellis_components

from calib.kernels.attend import products, reference
from calib.kernels.trellis import cpu
from calib.kernels.trellis import reference as trellis_reference
from calib.kernels.trellis.operation import trellis_levels
from calib.runtime.stages.codec import Sized, TrellisQuant

pytestmark = [
    pytest.mark.arithmetic,
    pytest.mark.skipif(
        not any(map(shutil.which, ("cc", "gcc", "clang"))) and "CC" not in os.environ, reason="no C compiler"
    ),
]

PATTERNS = [
    ((5, 4, 3, 2, 1, 1), (2, 0, 1)), ((8, 8), (3, 1, 2)), ((1,) * 16, (1, 2)), ((8,), (1, 4, 3)), ((4,) * 4, (3, 3)),
    ((7, 5, 4), (2, 3)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.delenv("CALIB_KERNELS", raising=False)


def tile_of(counts, tokens, batch=2, seed=0):
    """Words in the memory layout of a pool: a slice of longer rows."""
    draw, shape = torch.Generator().manual_seed(seed), (batch, 1, sum(counts), tokens + 9)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=draw)[..., 4 : 4 + tokens]


def own_of(widths, counts):
    """Whether a head has a word for each component: bool `[heads, components, 1]`."""
    return (torch.arange(len(widths) * max(counts)) % max(counts) < torch.tensor(counts)[:, None]).unsqueeze(-1)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 100])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_levels_are_those_of_plain_torch_and_of_the_definition(widths, counts, tokens):
    words, own = tile_of(counts, tokens), own_of(widths, counts)
    assert cpu.reads(words)
    levels = trellis_levels(words, widths, counts)
    assert levels.dtype == torch.int16 and bool((levels[:, ~own.expand(-1, -1, tokens)] == 0).all())
    assert torch.equal(levels, trellis_reference.trellis_levels(words, widths, counts) * own)
    held = trellis_components(np.ascontiguousarray(words.mT.numpy()), widths, counts)
    step = 2.0 ** -torch.tensor(widths).repeat_interleave(max(counts)).double()
    y = ((levels.double().mT + 0.5) * step - 1).numpy()
    there = ~np.isnan(held)
    assert there.sum() == int(own.sum()) * 2 * tokens and (y[there] == held[there]).all()


def near(found, wanted, sizes):
    """Whether the error is at most float32's rounding of a sum whose terms' absolute values add up to `sizes`."""
    return found.dtype == torch.float32 and bool(((found.double() - wanted).abs() <= 1e-5 * sizes + 1e-30).all())


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_products_with_levels_are_those_of_float64(widths, counts, rows):
    """C supports at most eight query rows, so nine are computed by plain torch. Levels go up to 511, beyond a word's field."""
    draw = torch.Generator().manual_seed(1)
    numbers, heads = trellis_levels(tile_of(counts, 77), widths, counts), len(counts)
    query, weights = (torch.randn(2, heads, rows, n, generator=draw) for n in (numbers.shape[2], 77))
    wide = numbers.double()
    assert near(products.number_scores(query, numbers), query.double() @ wide, query.abs().double() @ wide)
    assert near(products.number_mix(weights, numbers), weights.double() @ wide.mT, weights.abs().double() @ wide.mT)
    sizes, one = torch.rand(2, heads, 1, 77, generator=draw) + 0.1, torch.ones(2, heads, 1, 77)
    angles, asked = torch.randn(10, 77, generator=draw), torch.randn(2, heads, rows, 24, generator=draw)
    for size in (None, sizes):
        parts = [numbers.float(), one] if size is None else [numbers * size, size, one]
        matrix = torch.randn(heads, 24, numbers.shape[2] + len(parts) - 1, generator=draw)
        found = products.rotated_number_scores(asked, numbers, matrix, angles.cos(), angles.sin(), size)
        table = torch.cat([part.double() for part in parts], -2)
        bound = asked.abs().double() @ torch.ones(24, 24).double() @ (matrix.abs().double() @ table)
        cos, sin = angles.double().cos(), angles.double().sin()
        wanted = reference.rotated_scores(asked.double(), matrix.double() @ table, cos, sin)
        assert near(found, wanted, 2 * bound)


@pytest.mark.parametrize("sized", [False, True])
def test_a_codec_attends_alike_with_and_without_c(sized, monkeypatch):
    widths, counts = (4, 4, 3, 2, 2, 1), (2, 1)
    draw, own = torch.Generator().manual_seed(2), own_of(widths, counts).mT.float()
    quant = TrellisQuant(widths, counts, own)
    quant = Sized(quant, own / 3) if sized else quant
    block = quant.encode(0.5 * torch.randn(2, 2, 70, own.shape[-1], generator=draw) * own)
    tile = {name: part.mT.contiguous() for name, part in block.items()}
    query, weights = torch.randn(2, 2, 3, own.shape[-1], generator=draw) * own, torch.rand(2, 2, 3, 70, generator=draw)
    found = quant.scores(query, tile), quant.mix(weights, tile, own.shape[-1]) * own
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    wanted = quant.scores(query, tile), quant.mix(weights, tile, own.shape[-1]) * own
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
