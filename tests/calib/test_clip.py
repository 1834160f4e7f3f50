"""Clip factors and held-out errors against their definitions, one token at a time."""

import math
from itertools import pairwise

import pytest
import torch
from toy_layer_sample import SHAPE, rows_of, sample

from calib.runtime.stages.codec import UniformQuant
from calib.statistics.attention_error import Reference
from calib.statistics.channel_range import ChannelRanges
from calib.statistics.channel_scale import ChannelScales
from calib.statistics.clip import FACTORS, FAR, ClipFactors
from calib.statistics.forms import Candidates, forms
from calib.statistics.heldout_error import HeldoutError

pytestmark = pytest.mark.arithmetic


def output(queries, keys, values, row, window) -> torch.Tensor:
    """Return the attention output of one query row of one head in float64, a token at a time."""
    first = 0 if window is None else max(0, row - window + 1)
    logits = [float(queries[row] @ keys[t]) * 32**-0.5 for t in range(first, row + 1)]
    weights = [math.exp(x - max(logits)) for x in logits]
    mixed = sum(w * values[t] for w, t in zip(weights, range(first, row + 1), strict=True))
    return mixed / sum(weights)


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("form", forms(32), ids=lambda form: f"{form.stream}-{form.name}")
def test_clip_errors_against_a_loop(form, window):
    """The error of each factor, for each form, by its definition: quantise keys or values, attend, sum squared output errors."""
    one = sample(batch=1, window=window)
    ranges = {}
    for statistic in (ChannelRanges(SHAPE), ChannelScales(SHAPE)):
        statistic.observe(one)
        ranges |= statistic.tensors()
    clip = ClipFactors(SHAPE, bits=(2,), factors=(1.0, 0.7), rows=3)
    clip.ranges = ranges
    clip.observe(one)
    number = clip.forms.index(form)
    x = {"keys": one.keys, "values": one.values}[form.stream][0].double()  # [2, 64, 32]
    low, high = (ranges[f"{form.stream}.{end}"][0].double() for end in ("low", "high"))
    scale = ranges["values.scale"][0].double()
    for column, factor in enumerate((1.0, 0.7)):
        approximate = torch.empty_like(x)
        for head in range(2):
            for t in range(64):
                for c in range(32):
                    unit = scale[head, c] if form.transform == "scale" else 1.0
                    if form.group == (32, 1):
                        group = x[head, t // 32 * 32 : t // 32 * 32 + 32, c]
                    else:
                        group = x[head, t] / (scale[head] if form.transform == "scale" else 1.0)
                    least, most = (low[head, c], high[head, c]) if form.group is None else (group.min(), group.max())
                    middle, half = (most + least) / 2, factor * (most - least) / 2
                    code = torch.floor((x[head, t, c] / unit - middle + half) / (2 * half / 3) + 0.5).clamp(0, 3)
                    approximate[head, t, c] = (code * 2 * half / 3 + middle - half) * unit
        for head in range(2):
            error = 0.0
            for row in (32, 47, 63):
                for query in (2 * head, 2 * head + 1):
                    q, k, v = one.queries[0, query].double(), one.keys[0, head].double(), one.values[0, head].double()
                    other = (approximate[head], v) if form.stream == "keys" else (k, approximate[head])
                    error += float((output(q, *other, row, window) - output(q, k, v, row, window)).square().sum())
            found = getattr(clip, f"error_{number}")[0, head, 0, column].item()
            assert found == pytest.approx(error, rel=2e-2)  # scale and zero are stored in float16


@pytest.mark.parametrize("size", [0.0, 1.0, 6e4], ids=["zeros", "ordinary", "beyond_float16"])
@pytest.mark.parametrize("form", forms(32), ids=lambda form: f"{form.stream}-{form.name}")
def test_candidates_are_what_the_codec_decodes_to_the_bit(form, size):
    """With a constant channel and a constant token, whose scales are 0."""
    x = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(2)) * size
    x[..., 3], x[:, :, 5] = 0.5 * size, -size
    low, high = torch.full((1, 3, 32), -1.5 * size - 1), torch.full((1, 3, 32), 2.0 * size + 1)
    ranges = {f"{form.stream}.low": low, f"{form.stream}.high": high, "values.scale": high}
    candidates = Candidates(form, x, ranges, 0)
    for bits in range(1, 9):
        for factor in FACTORS:
            assert torch.equal(candidates.at(bits, factor), form.approximate(x, bits, factor, ranges, 0)), (
                bits,
                factor,
            )


def test_the_factor_of_least_error_is_chosen_and_ties_go_to_the_larger():
    clip = ClipFactors(SHAPE, bits=(2, 4), factors=(1.0, 0.8, 0.5))
    clip.error_0 += 3.0
    clip.error_0[1, 0, 1] = torch.tensor([2.0, 1.0, 1.5])
    clip.error_0[1, 1, 0] = torch.tensor([2.0, 1.0, 1.0])
    chosen = clip.tensors()["keys.clip.32x1"]
    assert chosen.shape == (2, 2, 2)
    assert chosen[1, 0].tolist() == [1.0, pytest.approx(0.8)]
    assert chosen[1, 1].tolist() == [pytest.approx(0.8), 1.0]
    assert torch.equal(chosen[0], torch.ones(2, 2))


def test_few_levels_want_a_smaller_clip_than_many():
    clip = ClipFactors(SHAPE, rows=16)
    ranges = {}
    for statistic in (ChannelRanges(SHAPE), ChannelScales(SHAPE)):
        statistic.observe(sample(tokens=128, spread=0.3))
        ranges |= statistic.tensors()
    clip.ranges = ranges
    clip.observe(sample(tokens=128, spread=0.3))
    for name, chosen in clip.tensors().items():
        means = chosen[0].mean(0).tolist()  # bits 1, 2, 3, 4
        assert all(fewer <= more + 0.05 for fewer, more in pairwise(means)), (name, means)
        assert means[0] < means[-1], (name, means)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_factors_far_from_the_best_are_not_tried_and_the_same_are_chosen(bits, monkeypatch):
    """A factor that is not tried gets an error above FAR times the least."""
    one, ranges = sample(tokens=128, spread=0.3), {}
    for statistic in (ChannelRanges(SHAPE), ChannelScales(SHAPE)):
        statistic.observe(one)
        ranges |= statistic.tensors()
    searched, whole = ClipFactors(SHAPE, bits=(bits,), rows=16), ClipFactors(SHAPE, bits=(bits,), rows=16)
    searched.ranges = whole.ranges = ranges
    searched.observe(one)
    monkeypatch.setattr("calib.statistics.clip.FAR", math.inf)
    whole.observe(one)
    left_out = 0
    for name in whole.reductions:
        all_errors, errors = getattr(whole, name)[0], getattr(searched, name)[0]
        least = all_errors.amin(-1, keepdim=True)
        other = errors != all_errors
        left_out += int(other.sum())
        assert (errors[other] > FAR * least.expand_as(errors)[other]).all()
    assert left_out
    for name, factors in whole.tensors().items():
        assert torch.equal(searched.tensors()[name], factors)


def test_clip_measures_padded_rows_like_the_rows_alone():
    one = sample(batch=2, padding=(32, 0))
    ranges = {"keys.low": one.keys.amin((0, 2)), "keys.high": one.keys.amax((0, 2))}
    ranges = {name: tensor[None] for name, tensor in ranges.items()}
    ranges |= {f"values.{end}": ranges[f"keys.{end}"] * 2 for end in ("low", "high")}
    ranges["values.scale"] = torch.ones(1, 2, 32)
    together, apart = (ClipFactors(SHAPE, bits=(2,), factors=(1.0, 0.8), rows=4) for _ in range(2))
    together.ranges = apart.ranges = ranges
    together.observe(one)
    apart.observe(rows_of(one, slice(0, 1), slice(32, None)))
    apart.observe(rows_of(one, slice(1, 2)))
    for name in together.reductions:
        torch.testing.assert_close(getattr(together, name), getattr(apart, name), rtol=1e-5, atol=1e-9)


def test_heldout_error_of_the_prompt_setting_is_that_of_kivis_codecs():
    one = sample(batch=2)
    heldout = HeldoutError(SHAPE, bits=(2, 4), rows=8)
    ones = torch.ones(2, 2, 2)
    ranges = ChannelRanges(SHAPE)
    ranges.observe(one)
    heldout.fitted = {**ranges.tensors(), "values.scale": torch.ones(2, 2, 32)} | {
        f"{form.stream}.clip.{form.name}": ones * (0.75 if form.name != "fixed" else 1) for form in forms(32)
    }
    heldout.observe(one)
    reference = Reference.of(one, 8)
    for column, bits in enumerate((2, 4)):
        for row, clip in enumerate((1.0, 0.75)):
            keys, values = UniformQuant(bits, (32, 1), clip), UniformQuant(bits, (1, 32), clip)
            moved = reference.output_with(
                keys.decode(keys.encode(one.keys), 32), values.decode(values.encode(one.values), 32)
            )
            expected = ((moved - reference.output).square().sum() / reference.output.square().sum()).sqrt()
            assert heldout.relative()[0, row, column].item() == pytest.approx(expected.item(), rel=1e-5)
    assert (heldout.relative()[1] == 0).all()
    torch.testing.assert_close(heldout.overall(), heldout.relative()[0])


def test_reference_is_plain_causal_attention():
    one = sample(batch=1, tokens=70, softcap=None)  # 70: the last six tokens are no whole group of 32
    reference = Reference.of(one, rows=2)
    assert reference.keys.shape[2] == 64
    for position, row in enumerate((32, 63)):
        for head in range(4):
            q, k, v = one.queries[0, head].double(), one.keys[0, head // 2].double(), one.values[0, head // 2].double()
            expected = output(q, k, v, row, None)
            torch.testing.assert_close(
                reference.output[0, head // 2, head % 2, position].double(), expected, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(("head_dim", "group"), [(64, 32), (128, 32), (80, 20), (16, 16), (96, 32)])
def test_groups_divide_every_head(head_dim, group):
    names = {form.name for form in forms(head_dim)}
    assert {f"1x{group}", f"scaled.1x{group}", "32x1", "1x*", "fixed"} == names
