"""Residuals of values after their prediction from the keys' codes, by the interpreted kernel: the bits of plain torch."""

import pytest
import torch
from component_inputs import basis_of, codecs, prediction_of, tokens_of
from trellis_inputs import PATTERNS

from calib.kernels.predictions.operation import supported
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.codec.sized import Sized

pytest.importorskip("calib.kernels.predictions.triton", reason="Triton is not installed")

pytestmark = pytest.mark.arithmetic

TOKENS = 37


def same(codec: Sized, channels: int, monkeypatch, dtype=torch.float32, rows=2) -> bool:
    """Whether the kernel gives the same bits as plain torch, for keys of 20 channels and values that are not contiguous."""
    basis = basis_of(codec.codec.widths, codec.codec.counts, 20)
    keys = encoded(basis, codec, tokens_of(basis, TOKENS, torch.float32, rows), False)
    prediction = prediction_of(codec.codec.widths, codec.codec.counts, channels)
    heads = len(codec.codec.counts)
    draw = torch.Generator().manual_seed(6)
    values = torch.randn(rows, TOKENS, heads, channels, generator=draw).mul(9).to(dtype).transpose(1, 2)
    wanted = values.float() - prediction.values(codec, keys)
    assert not supported(values, codec.packed(keys, prediction.table.shape[1], {}))
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    assert supported(values, codec.packed(keys, prediction.table.shape[1], {}))
    found = prediction.taken_off(values, codec, keys)
    monkeypatch.delenv("CALIB_KERNELS")
    assert found.dtype == torch.float32 and wanted.abs().max() > 1
    return torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["sized", "sized trellis"])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_values_are_those_of_torch(widths, counts, kind, monkeypatch):
    """All bit widths, heads with few words and with none; tokens and channels do not fill a program."""
    assert same(codecs(widths, counts)[kind], 24, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [16, 80, 128, 160])
def test_heads_of_many_channels(channels, dtype, monkeypatch):
    """Channels are split over several programs, the last of which may be partly filled."""
    assert same(codecs((6, 4, 3, 2, 1), (12, 7))["sized"], channels, monkeypatch, dtype, rows=1)


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_sizes_in_bytes_and_in_words(heads, monkeypatch):
    """The sizes of a token are in a byte for one or two heads, else in one or two words."""
    codec = codecs((4, 3, 1), (2,) * heads)["sized"]
    assert codec.dtype == (torch.uint8 if heads <= 2 else torch.int16)
    assert same(codec, 24, monkeypatch)
