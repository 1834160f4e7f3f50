"""Edge cases of corrections: overflow of calibrated outliers, numbers near and beyond float16's end, wrong shares and ranks."""

import pytest
import torch
from corrected_codecs import (
    CHANNELS,
    DTYPES,
    FORMS,
    HEADS,
    all_outliers,
    backbone_alone,
    encoded,
    randn,
    thresholds,
    tokens,
)

from calib.runtime.stages.codec import Corrected, Exact, UniformQuant
from calib.runtime.stages.codec.corrected import OVERFLOWED, counted, counter
from calib.runtime.stages.correction import LowRank, Outliers

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize(
    "outliers", all_outliers(0.02), ids=lambda part: part and f"{part.ranked} {part.low is not None}"
)
def test_overflow_is_counted_once_for_each_row(outliers):
    """Entries beyond a threshold that get no slot are counted for each row; `counted` adds them up and removes the count from the
    block.
    """
    x = tokens("normal", 3, 40, 0)
    codec = Corrected(UniformQuant(2, (1, None)), outliers, LowRank(2))
    block, count = codec.encode(x), counter(codec, x.device)
    if outliers is None or outliers.low is None:
        assert count is None and OVERFLOWED not in block and counted(block, None) is block
        return
    beyond = ((x < outliers.low) | (x > outliers.high)).sum((1, 2, 3))
    slots = backbone_alone(codec, x)[1].sum((1, 2, 3))
    assert block[OVERFLOWED].tolist() == (beyond - slots).tolist() and bool((block[OVERFLOWED] > 0).all())
    rest = counted(counted(block, count) | {OVERFLOWED: block[OVERFLOWED]}, count)
    assert int(count) == 2 * int(block[OVERFLOWED].sum()) and OVERFLOWED not in rest


def test_numbers_beyond_float16_are_kept_in_float32():
    """Of three rows, one is 1e5 times as large: outliers of each row are exact to 2^-10 of the row's largest value."""
    x = tokens("real", 3, 40, 2)
    x[1] *= 1e5
    codec = Corrected(UniformQuant(2, (None, 1)), Outliers(0.1, "tokens"), LowRank(2))
    assert codec.fp32_params(x)
    block = codec.encode(x)
    assert block["outliers.delta"].dtype == block["low_rank.basis"].dtype == torch.float32
    _, mask, _ = backbone_alone(codec, x)
    error = (codec.decode(block, CHANNELS) - x).abs() / x.abs().amax((1, 2, 3), keepdim=True)
    assert error[mask].max() < 2.0**-10


@pytest.mark.parametrize("codec", [UniformQuant(2, (None, 1)), UniformQuant(4, (1, None), across_heads=True)], ids=repr)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_of_sixteen_bits(dtype, form, codec):
    """Outliers that are 23,500 from other values, which float16 still holds: distances and factors are finite, and outliers are off
    by half a float16 unit at 32768 at most."""
    x = -8_000 + 50 * randn(2, HEADS, 40, CHANNELS)
    x[:, :, 7::9, 3] += 23_500
    x = x.to(dtype)
    corrected = Corrected(codec, Outliers(0.06, *form), LowRank(2))
    assert not corrected.fp32_params(x)
    block = encoded(corrected, x)
    assert all(bool(part.isfinite().all()) for part in block.values()) and block["outliers.delta"].abs().max() > 15_000
    error = (corrected.decode(block, CHANNELS) - x.float()).abs()
    assert error[backbone_alone(corrected, x)[1]].max() <= 2.0**-11 * 32768


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outlier_farther_than_float16_reaches_is_kept_in_float32(dtype):
    x = torch.full((1, HEADS, 40, CHANNELS), -60_000.0).to(dtype)
    x[:, :, 7, 3] = 60_000
    corrected = Corrected(UniformQuant(2, (None, 1)), Outliers(0.06, "tokens"), LowRank(2))
    assert corrected.fp32_params(x)
    block = encoded(corrected, x)
    assert block["outliers.delta"].dtype == torch.float32 and block["outliers.delta"].abs().max() > 100_000
    assert (corrected.decode(block, CHANNELS) - x.float())[:, :, 7, 3].abs().max() <= 1


def test_what_is_encoded_is_decoded_with_its_count_beside_it():
    codec = Corrected(UniformQuant(2, (1, None)), Outliers(0.1, "tokens", False, "mean", *thresholds("tokens", False)))
    x = tokens("normal", 3, 40, 0)
    assert OVERFLOWED in codec.encode(x)
    assert torch.equal(codec.decode(codec.encode(x), CHANNELS), codec.decode(encoded(codec, x), CHANNELS))


@pytest.mark.parametrize("codec", [Exact(), UniformQuant(2, (1, None)), UniformQuant(4, None)], ids=repr)
def test_what_a_segment_shares_is_refused_where_there_are_none(codec):
    """Outlier lists over tokens and iterated factors need a segment, so `fields` refuses them without one; outliers of single
    tokens and coefficients of a calibrated basis do not."""
    basis = LowRank(2, basis=torch.eye(CHANNELS)[:4].expand(HEADS, 4, CHANNELS))
    for parts in ((Outliers(0.1, "tokens"), None), (Outliers(0.1, "matrix"), None), (None, LowRank(2)),
                  (Outliers(0.1, "channels", True), None), (None, LowRank(2, True))):  # fmt: skip
        with pytest.raises(ValueError, match=r"computed over a whole segment.*statistics='calibrated'"):
            Corrected(codec, *parts).fields(CHANNELS, torch.float32)
    one = Corrected(codec, Outliers(0.2, "channels"), basis)
    x = tokens("normal", 2, 7, 1)
    together = one.encode(x)
    assert set(one.fields(CHANNELS, torch.float32)) == set(together)
    for token in range(7):
        alone = one.encode(x[:, :, token : token + 1])
        assert all(torch.equal(alone[name][:, :, 0], part[:, :, token]) for name, part in together.items())


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        *((lambda rank=rank: LowRank(rank), ["rank", repr(rank)]) for rank in (0, -1, 1.5, "4", True, None)),
        (lambda: LowRank(5, basis=torch.eye(8)[:4][None]), ["4 vectors", "5"]),
        (lambda: LowRank(0.5, basis=torch.eye(8)[:4][None]), ["4 vectors", "0.5"]),
        *((lambda s=s: Outliers(s, "tokens"), ["share from 0 to 1", repr(s)]) for s in (0, -0.1, 2, True, "0.1")),
    ],
)
def test_stages_refuse_what_is_no_share_or_rank(make, parts):
    with pytest.raises(ValueError, match=r"\S") as error:
        make()
    assert all(part in str(error.value) for part in parts), error.value
