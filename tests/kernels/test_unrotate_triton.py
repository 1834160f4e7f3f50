"""Keys with RoPE undone: plain torch against float64, and the interpreted kernel against plain torch, bit for bit."""

import pytest
import torch
from torch import Tensor

from calib.kernels.unrotate import operation, reference

pytestmark = pytest.mark.arithmetic

triton = pytest.importorskip("calib.kernels.unrotate.triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed."""
    empty = torch.empty
    monkeypatch.setattr(triton.torch, "empty", lambda *shape, **of: empty(*shape, **of).fill_(torch.nan))


def drawn(shape: tuple[int, ...], half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in a tensor that is NaN elsewhere, and the cos and sin of their angles."""
    draw = torch.Generator().manual_seed(shape[2])
    around = torch.full((shape[0], shape[2] + 3, shape[1], shape[3] + 5), torch.nan, dtype=dtype)
    keys = around.transpose(1, 2)[:, :, 1:-2, 2:-3].copy_(torch.randn(shape, generator=draw) * 10)
    angles = torch.rand(shape[2], half, generator=draw) * 6.3
    return keys, angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 70, 128), (1, 2, 33, 80), (1, 1, 1, 64), (3, 1, 5, 6)], ids=str)
@pytest.mark.parametrize("share", [1, 4])
def test_the_same_bits(shape, share, dtype):
    given = drawn(shape, max(1, shape[3] // (2 * share)), dtype)
    found, expected = triton.unrotated(*given), reference.unrotated(*given)
    assert (found.dtype, found.shape) == (torch.float32, shape) and found.is_contiguous()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("shape", [(2, 3, 70, 128), (3, 1, 5, 6)], ids=str)
def test_rows_at_positions_of_their_own(shape):
    """Angles per batch row: each row has the bits that it has alone."""
    keys, *_ = drawn(shape, 2, torch.bfloat16)
    angles = torch.rand(shape[0], shape[2], shape[3] // 4, generator=torch.Generator().manual_seed(3)) * 6.3
    for form in (triton, reference):
        found = form.unrotated(keys, angles.cos(), angles.sin())
        for row in range(shape[0]):
            alone = reference.unrotated(keys[row : row + 1], angles[row].cos(), angles[row].sin())
            assert torch.equal(found[row : row + 1].view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("half", [1, 12, 32])
def test_rotation_is_undone(half):
    """Against complex multiplication in float64; channels that are not rotated keep their bits."""
    keys, cos, sin = drawn((2, 2, 50, 64), half, torch.float32)
    turned = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    angle = torch.complex(cos.double(), sin.double())
    back = turned * angle.conj()
    found = reference.unrotated(keys, cos, sin)
    assert (found[..., :half] - back.real).abs().max() < 1e-5 and (
        found[..., half : 2 * half] - back.imag
    ).abs().max() < 1e-5
    assert torch.equal(found[..., 2 * half :], keys[..., 2 * half :])
    assert (reference.rotated(found, cos, sin) - keys).abs().max() < 1e-4


def test_nothing_of_nothing():
    for shape in ((0, 2, 3, 8), (1, 2, 0, 8)):
        keys, angles = torch.zeros(shape), torch.zeros(shape[2], 4)
        for form in (reference, triton):
            assert form.unrotated(keys, angles, angles).shape == shape


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_runs_what_serves(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked, original = [], triton.unrotated
    monkeypatch.setattr(triton, "unrotated", lambda *given: asked.append(given) or original(*given))
    keys, cos, sin = drawn((1, 2, 9, 16), 8, torch.float16)
    assert torch.equal(operation.unrotated(keys, cos, sin), reference.unrotated(keys, cos, sin))
    assert len(asked) == (forced == "triton")
    asked.clear()
    apart = keys.mT.contiguous().mT  # a channel's tokens side by side
    operation.unrotated(apart, cos, sin)
    operation.unrotated(keys.double(), cos, sin)
    operation.unrotated(keys, cos.mT.contiguous().mT, sin)
    operation.unrotated(keys, cos[:, :0], sin[:, :0])
    assert not asked
