"""The kernel that projects tokens on a basis and quantises the components, in Triton's interpreter: words and sizes are those of
the stages in plain torch, bit for bit."""

import pytest
import torch
from component_inputs import basis_of, codecs, tokens_of
from trellis_inputs import PATTERNS

from calib.kernels.components.operation import supported
from calib.runtime.stages.codec import MixedQuant
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.transform.basis import Basis
from calib.runtime.stages.transform.identity import Identity

pytest.importorskip("calib.kernels.components.triton", reason="Triton is not installed")

pytestmark = pytest.mark.arithmetic


def same(basis, codec, x, monkeypatch):
    wanted = encoded(basis, codec, x, False)
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    assert supported(x, (1,))
    assert codec.encode_projected(x, basis.projection()) is not None
    found = encoded(basis, codec, x, False)
    monkeypatch.delenv("CALIB_KERNELS")
    assert found.keys() == wanted.keys()
    return all(found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["uniform", "sized"])
@pytest.mark.parametrize(("widths", "counts"), PATTERNS)
def test_blocks_are_those_of_the_stages(widths, counts, kind, monkeypatch):
    """All bit widths, heads with few words and with none; 37 tokens do not fill a program's lanes."""
    basis = basis_of(widths, counts, 20)
    assert same(basis, codecs(widths, counts)[kind], tokens_of(basis, 37, torch.float32, rows=1), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["trellis", "sized trellis"])
def test_components_of_a_trellis(kind, monkeypatch):
    """With trellis-coded levels the kernel writes the components, of two rows here, and the search for words starts from them."""
    widths, counts = (7, 5, 4), (2, 0, 1)
    basis = basis_of(widths, counts, 20)
    assert same(basis, codecs(widths, counts)[kind], tokens_of(basis, 37, torch.float32), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [48, 80, 128, 160])
def test_heads_of_many_channels(channels, dtype, monkeypatch):
    """The kernel sums over channels in several turns, the last of which may be partly filled."""
    widths, counts = (6, 4, 3, 2, 1), (12, 7)
    basis = basis_of(widths, counts, channels)
    assert same(basis, codecs(widths, counts)["sized"], tokens_of(basis, 40, dtype, rows=1), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["uniform", "sized"])
def test_numbers_of_any_size(kind, monkeypatch):
    """Tokens of order 1e30, infinite ones, and tokens of order 2^-120."""
    widths, counts = (4, 3, 1), (2, 3)
    basis = basis_of(widths, counts, 32)
    x = tokens_of(basis, 40, torch.float32)
    x[0, :, ::2] *= 1e30
    x[1, :, ::3, ::4] = torch.inf
    x[1, :, 1::3, 1::4] = -torch.inf
    assert same(basis, codecs(widths, counts)[kind], x, monkeypatch)
    unmoved = Basis(
        0 * basis.mean, *(getattr(basis, name) for name in ("unit", "into", "scale", "back", "size", "gain", "origin"))
    )
    assert same(unmoved, codecs(widths, counts)[kind], x.clamp(-1, 1) * 2.0**-120, monkeypatch)


@pytest.mark.full
def test_sizes_between_two(monkeypatch):
    """500 tokens whose distances from the mean grow from 2^-6 to 2^6 times one vector, so that many are near the border between two
    sizes."""
    widths, counts = (2, 2, 2, 2), (2, 2)
    basis = basis_of(widths, counts, 16)
    one = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(3)) * basis.unit * 2**16
    x = basis.mean + one * torch.logspace(-6, 6, 500, base=2)[:, None]
    assert same(basis, codecs(widths, counts)["sized"], x, monkeypatch)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_or_none(tokens, monkeypatch):
    widths, counts = (4, 4, 4, 4), (1, 2)
    basis = basis_of(widths, counts, 16)
    assert same(basis, codecs(widths, counts)["sized"], tokens_of(basis, tokens, torch.float32), monkeypatch)


@pytest.mark.full
def test_a_part_of_a_larger_tensor(monkeypatch):
    """Every second token of a tensor, and channels that are not contiguous."""
    widths, counts = (5, 5, 5), (2, 2)
    basis = basis_of(widths, counts, 16)
    x = tokens_of(basis, 60, torch.bfloat16)
    for part in (x[:, :, ::2], x.mT.contiguous().mT):
        assert same(basis, codecs(widths, counts)["sized"], part, monkeypatch)


def test_without_a_basis_it_is_not_asked(monkeypatch):
    codec, x = MixedQuant((4, 4, 4, 4), (2, 2)), torch.randn(1, 2, 9, 8)
    wanted = encoded(Identity(), codec, x, False)
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    assert torch.equal(encoded(Identity(), codec, x, False)["words"], wanted["words"])
