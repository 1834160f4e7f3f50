"""Trellis-coded words by the interpreted kernel: the bits of plain torch."""

import pytest
import torch
from trellis_inputs import PATTERNS, components, weights_of

from calib.kernels.trellis import reference
from calib.kernels.trellis.operation import trellis_words

triton = pytest.importorskip("calib.kernels.trellis.triton", reason="Triton is not installed")

# Lanes without a token compute with arbitrary numbers, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def in_triton(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")


def same(y, widths, counts, weights):
    words = trellis_words(y, widths, counts, weights)
    assert words.dtype == torch.int16 and words.shape == (y.shape[0], 1, y.shape[2], sum(counts))
    return torch.equal(words, reference.trellis_words(y, widths, counts, weights))


@pytest.mark.parametrize("spread", [0.02, 0.5, 1e6])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_words_are_those_of_plain_torch(widths, counts, spread, monkeypatch):
    """Heads with few words and with none; 21 tokens do not fill programs of 16."""
    monkeypatch.setattr(triton, "TOKENS", 16)
    y = spread * components(widths, counts, batch=1 + (spread < 1), tokens=21)
    assert same(y, widths, counts, weights_of(widths, counts))


@pytest.mark.full
def test_levels_that_are_equally_near():
    """Components midway between two levels, tokens of zeros, and weights that are all equal or 0."""
    widths, counts = (3, 2, 2, 1), (5, 2)
    y = (components(widths, counts, 1, 40) * 8).round() / 8
    y[:, :, ::3] = 0
    weights = weights_of(widths, counts)
    for own in (weights, (weights > 0).float(), 0 * weights):
        assert same(y, widths, counts, own)


@pytest.mark.full
def test_what_is_no_number():
    widths, counts = (4, 3, 1), (2, 3)
    y = components(widths, counts, 1, 20)
    for odd in (torch.nan, torch.inf, -torch.inf, 3e38):
        changed = y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.2, odd)
        assert same(changed, widths, counts, weights_of(widths, counts))


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (2, 1)])
def test_few_tokens_or_none(shape):
    rows, tokens = shape
    widths, counts = (4, 4, 4, 4), (1, 2)
    y = components(widths, counts, rows, tokens)
    assert same(y, widths, counts, weights_of(widths, counts))


def test_a_part_of_a_larger_tensor():
    widths, counts = (5, 5, 5), (2, 2)
    y = components(widths, counts, 2, 30)[:, :, ::2]
    assert same(y, widths, counts, weights_of(widths, counts))
