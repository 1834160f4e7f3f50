"""Laws of outliers and low-rank factors around every codec: their effect on the error, and which entries are outliers."""

import pytest
import torch
from corrected_codecs import CHANNELS, FORMS, backbone_alone, backbones, encoded, law, problems, tokens
from gear.oracle import Spec, approximated
from gear.samples import real_like
from hypothesis import given

from calib.runtime.stages.codec import Corrected, UniformQuant
from calib.runtime.stages.codec.corrected import OVERFLOWED
from calib.runtime.stages.contract import Codec
from calib.runtime.stages.correction import LowRank, Outliers

pytestmark = pytest.mark.arithmetic

# --- the error with corrections ---------------------------------------------------------------------------------------


@law
@given(problems(plain=True))
def test_an_outlier_is_exact_to_half_a_unit_of_its_distance(problem):
    codec, x, _ = problem
    block = encoded(codec, x)
    _, mask, _ = backbone_alone(codec, x)
    if codec.outliers is None:
        assert not any(name.startswith("outliers.") for name in block)
        return
    x = x.float()
    decoded = codec.decode(block, x.shape[-1])
    delta = codec.outliers.decode({n.removeprefix("outliers."): p for n, p in block.items() if "outliers" in n}, x)
    assert bool((delta[~mask] == 0).all())
    # float16 rounds by half a unit, 2^-11; float32 sums are exact to 2^-22 of the largest part.
    size = x.abs() + delta.abs() + (decoded - delta).abs()
    allowed = 2.0**-11 * delta.abs() + 2.0**-25 + 2.0**-21 * size.amax((-3, -2, -1), keepdim=True)
    assert bool(((decoded - x).abs() <= allowed)[mask].all())


def bound_of(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """The error bound that the codec declares; heads that share parameters are merged into one for it."""
    if not getattr(codec, "across_heads", False):
        return codec.error_bound(x)
    merged = x.transpose(1, 2).flatten(2)[:, None]
    bound = UniformQuant(codec.bits, codec.group).error_bound(merged)
    return bound.view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


@pytest.mark.full
@law
@given(problems(plain=True))
def test_elsewhere_the_error_is_the_codecs_on_what_is_left_and_low_rank_takes_from_it(problem):
    codec, x, _ = problem
    filled, mask, decoded = backbone_alone(codec, x)
    block, x = encoded(codec, x), x.float()
    residual = (x - decoded).masked_fill(mask, 0)
    noise = 2.0**-20 * (x.abs().max() + decoded.abs().max())
    assert bool((residual.abs() <= bound_of(codec.codec, filled) + noise).all())
    found = (codec.decode(block, x.shape[-1]) - x).masked_fill(mask, 0)
    if codec.low_rank is None:
        assert bool(((found + residual).abs() <= noise).all())
        return
    for row, before in zip(found, residual, strict=True):
        rest, whole = (part.double().transpose(0, 1).flatten(1) for part in (row, before))
        # Subtracting a projection onto a basis never increases the norm, over all heads together and for each alone. At outliers
        # the low-rank part is corrected, which reduces the error further.
        slack = 2.0**-9 * whole.norm() + noise * whole.numel() ** 0.5
        assert rest.norm() <= whole.norm() + slack
        if not codec.low_rank.across_heads:
            assert bool((row.double().norm(dim=(1, 2)) <= before.double().norm(dim=(1, 2)) + slack).all())


@pytest.mark.parametrize("low_rank", [LowRank(2), LowRank(0.3, across_heads=True)], ids=["heads", "across heads"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("codec", [codec for codec in backbones(64) if codec.token_group() != 2][1:], ids=repr)
def test_errors_are_in_order_on_tokens_like_a_models(codec, form, low_rank):
    """Mean squared errors over six segments: codes alone > with outliers > with outliers and low rank > 0."""
    x = tokens("real", 6, 64, 1)
    if codec.group is None:
        x = x / x.abs().amax() * 3
    outliers, errors = Outliers(0.06, *form, "zero" if form[0] == "matrix" else "mean"), []
    for parts in ((None, None), (outliers, None), (outliers, low_rank)):
        corrected = Corrected(codec, *parts)
        errors.append(float((corrected.decode(corrected.encode(x), CHANNELS) - x).square().mean()))
    assert errors[0] > errors[1] > errors[2] > 0


# --- outliers ---------------------------------------------------------------------------------------------------------


@law
@given(problems())
def test_a_row_has_as_many_outliers_at_each_end_as_its_share_or_slots_for_them(problem):
    codec, x, _ = problem
    if codec.outliers is None:
        return
    for row in x.float().split(1):
        found = codec.outliers.find(row)
        rows = {
            "tokens": row.mT,
            "channels": row.transpose(1, 2).flatten(2)[:, None] if codec.outliers.across_heads else row,
            "matrix": row.transpose(1, 2).reshape(1, 1, 1, -1),
        }[codec.outliers.ranked]
        length = rows.shape[-1]
        count = min(max(1, int(codec.outliers.share * length / 2 + 1e-9)), length // 2)
        assert found.positions.shape == (*rows.shape[:-1], 2 * count)
        _, mask, _ = backbone_alone(codec, row)
        if codec.outliers.low is None:
            assert found.used is None and found.overflowed_outliers is None
            assert (found.mask.sum(-1) == 2 * count).all() and int(mask.sum()) == 2 * count * rows[..., 0].numel()
            if 0 < 2 * count < length:
                top, bottom = (rows.gather(-1, part) for part in found.positions.chunk(2, -1))
                rest = (
                    rows.masked_fill(found.mask, -torch.inf).amax(-1),
                    rows.masked_fill(found.mask, torch.inf).amin(-1),
                )
                assert (top.amin(-1) >= rest[0]).all() and (bottom.amax(-1) <= rest[1]).all()
        else:
            beyond = (row < codec.outliers.low) | (row > codec.outliers.high)
            assert bool((mask <= beyond).all()) and int(found.used.sum()) == int(mask.sum())
            assert int(found.overflowed_outliers) == int(beyond.sum() - mask.sum())
            assert codec.encode(row)[OVERFLOWED].tolist() == [int(found.overflowed_outliers)]


@law
@given(problems())
def test_what_takes_an_outliers_position(problem):
    codec, x, _ = problem
    if codec.outliers is None:
        return
    filled, mask, _ = backbone_alone(codec, x)
    x = x.float()
    assert torch.equal(filled[~mask], x[~mask])
    if codec.outliers.fill == "zero":
        assert bool((filled[mask] == 0).all())
        return
    axes = {("tokens", False): (2,), ("channels", False): (3,), ("channels", True): (1, 3)}
    axis = axes[codec.outliers.ranked, codec.outliers.across_heads]
    rest = (~mask).sum(axis, keepdim=True)
    mean = x.double().masked_fill(mask, 0).sum(axis, keepdim=True) / rest.clamp_min(1)
    error = (filled - mean).abs() / x.abs().amax().clamp_min(1e-30)
    assert bool((error[mask] < 1e-6).all())


def test_counts_are_what_was_written():
    """A share of .58 of 100 entries is 29 at each end, though .29 * 100 < 29 in float64; at least 1, at most half of them."""
    assert Outliers(0.58, "tokens").count(100) == 29
    assert [Outliers(0.02, "tokens").count(length) for length in (1, 2, 3, 100, 199, 200)] == [0, 1, 1, 1, 1, 2]
    assert [Outliers(1, "tokens").count(length) for length in (1, 2, 3, 5)] == [0, 1, 1, 2]


# --- low rank ---------------------------------------------------------------------------------------------------------


def test_ranks_are_what_was_written():
    assert [LowRank(4).of_segment(*shape) for shape in ((20, 64), (3, 64), (1, 64), (20, 2))] == [4, 3, 1, 2]
    assert [LowRank(0.29).of_segment(100, width) for width in (200, 10, 3, 1)] == [29, 2, 1, 1]
    assert LowRank(1.0).of_segment(7, 9) == 7 and LowRank(1).of_segment(7, 9) == 1


@pytest.mark.parametrize(("tokens_", "heads", "channels"), [(300, 2, 64), (20, 4, 64), (300, 4, 64), (256, 4, 64)])
@pytest.mark.parametrize("across", [False, True])
def test_rounds_start_where_seed_layer_and_head_say(tokens_, heads, channels, across):
    """Factors agree with the oracle's power iteration in float64 from the same start, with three rounds for large matrices, to four
    units of the stored factors; another layer has another start."""
    low_rank = LowRank(3, across).with_seed(5, 2)
    residual = torch.from_numpy(real_like((heads, tokens_, channels), 3))
    factors = low_rank.encode(residual[None], False)
    found = low_rank.decode(factors, channels)[0].double().numpy()
    spec = Spec.of("gear", seed=5, rank=3, **({"variant": "paper"} if across else {}))
    expected, _, unit = approximated(residual.double().numpy(), spec, 2, 3, None)
    assert (abs(found - expected) <= 4 * unit + 1e-4 * abs(expected).max()).all()
    other = LowRank(3, across).with_seed(5, 1)
    assert not torch.equal(other.encode(residual[None], False)["basis"], factors["basis"])
