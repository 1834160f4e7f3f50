"""Words, parameters and statistics from the kernels have the same bits as plain torch on the CPU."""

import pytest
import torch
from component_inputs import basis_of, codecs, prediction_of, tokens_of
from gpu.moved import moved

from benchmarks.gpu.inputs import tokens
from calib.kernels.channel_ranges import reference
from calib.kernels.channel_ranges.operation import extremes_of, measured
from calib.kernels.quantise.operation import encode_fixed, encode_uniform
from calib.kernels.quantise.prologue import Prologue
from calib.kernels.unrotate.operation import unrotated
from calib.runtime.stages.codec.encoded import encoded

CPU = torch.device("cpu")


def both(monkeypatch, device, call, *given):
    """The result of the kernel, moved to the CPU, and that of plain torch."""
    found = moved(call(*moved(given, device)), CPU)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    return found, call(*given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("bits", "group", "dim"),
    [(4, (32, 1), 128), (2, (1, 32), 128), (2, (1, None), 64), (3, (64, 1), 80), (8, (1, 32), 96)],
)
def test_measured_ranges(device, times, dtype, bits, group, dim, monkeypatch):
    x = tokens(2, 2, 64 * times, dim, 1, CPU, dtype)
    sizes = (group[0], group[1] or dim)
    found, expected = both(monkeypatch, device, lambda x: encode_uniform(x, sizes, bits, 1.0, torch.float16), x)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_calibrated_ranges_of_tokens_in_another_order(device, times, dtype, bits, monkeypatch):
    x = tokens(2, 2, 48 * times + 3, 128, 1, CPU, dtype)
    low, high = x.float().amin(2, keepdim=True), x.float().amax(2, keepdim=True)
    order = torch.rand(x.shape[:3]).argsort(-1)[..., : 32 * times]
    half = ((high - low) / 2).half()
    half[:, 0, :, ::9] = 0.0  # divided by 1
    prologue = Prologue(order, ((high + low) / 2).half(), half)
    found, expected = both(monkeypatch, device, lambda x, prologue: encode_fixed(x, bits, 1.0, prologue), x, prologue)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("dim", "half"), [(128, 64), (80, 40), (96, 12)])
def test_keys_before_rope(device, times, dim, half, dtype, monkeypatch):
    keys, angles = tokens(2, 3, 40 * times + 1, dim, 1, CPU, dtype), torch.rand(40 * times + 1, half) * 6.3
    found, expected = both(monkeypatch, device, unrotated, keys, angles.cos(), angles.sin())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["range", "root", "positive root", "balance"])
@pytest.mark.parametrize(("dim", "group"), [(128, 4), (80, 1), (256, 2)])
def test_what_is_measured_of_channels(device, times, dim, group, kind, dtype, monkeypatch):
    """Statistics of all tokens in float16, also with known extremes, and of some tokens in float32. Plain torch's square root is
    replaced by a correctly rounded one, as a GPU's is."""
    monkeypatch.setattr(reference, "root", lambda x: x.double().sqrt().float())
    keys, query = (tokens(2, heads, 150 * times + 5, dim, heads, CPU, dtype) for heads in (2, 2 * group))
    keys[..., 0], keys[0, 0, 7, 1] = 0, torch.nan
    order = torch.rand(keys.shape[:3]).argsort(-1)[..., : 70 * times]
    for kept, own in ((torch.float16, None), (torch.float32, order)):
        given = (kind, keys, kept, own, query)
        found, expected = both(monkeypatch, device, measured, *given)
        monkeypatch.setenv("CALIB_KERNELS", "triton")
        known = extremes_of(keys.to(device)) if own is None else None
        again = measured(*moved(given, device), extremes=known)
        for mine, other, third in zip(found, expected, moved(again, CPU), strict=True):
            assert torch.equal(mine.nan_to_num(1e4), other.nan_to_num(1e4)) and torch.equal(
                third.nan_to_num(1e4), other.nan_to_num(1e4)
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["uniform", "trellis", "sized", "sized trellis"])
@pytest.mark.parametrize(
    ("widths", "counts", "dim"), [((6, 4, 3, 2, 1), (16, 9), 128), ((1,) * 16, (7, 8), 128), ((4,) * 4, (12, 0), 80)]
)
def test_components(device, times, widths, counts, dim, kind, dtype, monkeypatch):
    """Words and sizes of components. Products with the basis are of integers, so they are exact."""
    basis, codec = basis_of(widths, counts, dim), codecs(widths, counts)[kind]
    x = tokens_of(basis, 12 * times + 5, dtype)
    found = encoded(*moved((basis, codec, x), device), False)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    expected = encoded(basis, codec, x, False)
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.equal(found[name].to(CPU), part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["sized", "sized trellis"])
@pytest.mark.parametrize(("widths", "counts", "dim"), [((6, 4, 3, 2, 1), (16, 9), 128), ((4,) * 4, (12, 0, 3), 80)])
def test_values_less_what_their_keys_predict(device, times, widths, counts, dim, kind, dtype, monkeypatch):
    """Residuals of values after their prediction from the keys' codes, for tokens with sizes. The table has integers, so sums are
    exact."""
    basis, codec, prediction = (
        basis_of(widths, counts, dim),
        codecs(widths, counts)[kind],
        prediction_of(widths, counts, dim),
    )
    x = tokens_of(basis, 12 * times + 5, dtype)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    keys = encoded(basis, codec, x, False)
    expected = prediction.taken_off(x, codec, keys)
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    prediction, *given = moved((prediction, x, codec, keys), device)
    assert torch.equal(prediction.taken_off(*given).to(CPU), expected)
