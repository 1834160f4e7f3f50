"""Trellis-coded words by compiled C: the bits of plain torch. Inputs that C does not support are left to plain torch."""

import os
import shutil

import pytest
import torch
from trellis_inputs import PATTERNS, components, weights_of

from calib.kernels import compiled
from calib.kernels.trellis import cpu, reference
from calib.kernels.trellis.operation import trellis_words
from calib.runtime.stages.codec import TrellisQuant

pytestmark = pytest.mark.arithmetic

there = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))) and "CC" not in os.environ, reason="no C compiler"
)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.delenv("CALIB_KERNELS", raising=False)


def same(y, widths, counts, weights):
    assert cpu.serves(y, weights)
    words = trellis_words(y, widths, counts, weights)
    assert words.dtype == torch.int16 and words.shape == (y.shape[0], 1, y.shape[2], sum(counts))
    return torch.equal(words, reference.trellis_words(y, widths, counts, weights))


@there
@pytest.mark.parametrize(("spread", "threads"), [(0.02, 1), (0.5, 2), (3.0, 1), (1e6, 1)])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_words_are_those_of_plain_torch(widths, counts, spread, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert same(spread * components(widths, counts), widths, counts, weights_of(widths, counts))
    finally:
        torch.set_num_threads(before)


@there
@pytest.mark.parametrize("equal", ["levels", "between levels", "all alike", "weights of 0"])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_of_equally_good_paths_the_same_is_taken(widths, counts, equal):
    y, weights = components(widths, counts), weights_of(widths, counts)
    if equal in ("levels", "between levels"):
        steps = (2.0 ** torch.tensor(widths)).repeat_interleave(max(counts))
        y = (y * steps).round() / steps + (0.5 / steps if equal == "levels" else 0)
        weights = (weights > 0).float()
    elif equal == "all alike":
        y, weights = torch.zeros_like(y), (weights > 0).float()
    else:
        weights = weights * (torch.rand(weights.shape, generator=torch.Generator().manual_seed(2)) < 0.3)
    assert same(y, widths, counts, weights)


@there
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 1e-40, -0.0, torch.finfo(torch.float32).max])
def test_numbers_that_are_none_and_the_largest(odd):
    """Infinite, subnormal and the largest components. A component of NaN is coded like -inf, below all levels."""
    widths, counts = (5, 4, 3, 2, 1, 1), (2, 0, 1)
    y, weights = components(widths, counts, tokens=200), weights_of(widths, counts)
    where = torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.2
    assert same(y.masked_fill(where, odd), widths, counts, weights)
    if odd != odd:
        beside = trellis_words(y.masked_fill(where, -torch.inf), widths, counts, weights)
        assert torch.equal(trellis_words(y.masked_fill(where, odd), widths, counts, weights), beside)


@there
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 15, 16, 17, 33])
def test_any_number_of_tokens(tokens):
    widths, counts = (4, 4, 3, 2, 2, 1), (2, 1)
    for batch in (0, 1, 3):
        y = components(widths, counts, batch, 33)[:, :, :tokens]
        assert same(y, widths, counts, weights_of(widths, counts))
        assert same(y.mT.contiguous().mT, widths, counts, weights_of(widths, counts))  # tokens side by side


@there
def test_heads_of_as_many_components_as_c_holds():
    widths, counts = (2,) * 8, (128, 126)
    y, weights = components(widths, counts, 1, 20), weights_of(widths, counts)
    assert y.shape[-1] == cpu.MOST_COMPONENTS
    assert same(y, widths, counts, weights)
    assert not cpu.serves(torch.zeros(1, 1, 4, cpu.MOST_COMPONENTS + 8), weights)


@there
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_codec_takes_components_of_any_dtype(dtype, monkeypatch):
    widths, counts = (4, 4, 3, 2, 2, 1), (2, 1)
    quant = TrellisQuant(widths, counts, weights_of(widths, counts).unsqueeze(1))
    y = components(widths, counts).to(dtype)
    words = quant.encode(y)["words"]
    assert torch.equal(words, quant.encode(y.float())["words"])
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    assert torch.equal(words, quant.encode(y)["words"])


@pytest.mark.full
def test_what_c_does_not_serve_goes_by_plain_torch(monkeypatch):
    widths, counts = (4, 4, 3, 2, 2, 1), (2, 1)
    y, weights = components(widths, counts), weights_of(widths, counts)
    wanted = reference.trellis_words(y, widths, counts, weights)
    monkeypatch.setattr(cpu, "trellis_words", lambda *_: pytest.fail("served"))
    compiled_ = torch.compile(lambda part: trellis_words(part, widths, counts, weights), backend="eager")
    assert torch.equal(compiled_(y), wanted)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    assert torch.equal(trellis_words(y, widths, counts, weights), wanted)
    monkeypatch.delenv("CALIB_KERNELS")
    monkeypatch.setattr(cpu, "library", lambda *_: None)
    assert torch.equal(trellis_words(y, widths, counts, weights), wanted)


@there
def test_options_make_another_library(monkeypatch, tmp_path):
    """Compiler options are part of a library's key: one with fused multiply-adds must not be loaded where they are forbidden."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.library.cache_clear()
    try:
        assert compiled.library(cpu.SOURCE, cpu.ROUNDED) is not None and compiled.library(cpu.SOURCE) is not None
        assert len(list((tmp_path / "calib" / "compiled").iterdir())) == 2
    finally:
        compiled.library.cache_clear()
