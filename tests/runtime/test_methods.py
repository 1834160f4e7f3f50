"""Methods' plans: which transforms, codecs and schedules they have from which tensors; and KIVI's tokens, from the raw keys."""

import numpy as np
import oracle
import pytest
import torch
from cases import BY_NAME, CASES, CLIP_BITS, calibrated_artifact
from layer_walk import Tokens, feed
from tolerances import ODD_CODES, STORED
from toy_models import random_model

from calib.runtime.methods import METHODS, Geometry, build
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.stages.codec import Exact, UniformQuant
from calib.runtime.stages.saliency import Accumulated, Normalised, Probes
from calib.runtime.stages.schedule import Blocks, SlidingResidual
from calib.runtime.stages.tiering import HeavyHitterBudget, RatioTiers, Sinks
from calib.runtime.stages.transform import (
    ChannelRange,
    ChannelScale,
    Identity,
    MeasuredBalancer,
    MeasuredRange,
    MeasuredScale,
)
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def artifact(model):
    return calibrated_artifact(model)


def clip(artifact, name: str, bits: int, layer: int) -> torch.Tensor:
    return artifact.tensors[name][layer, :, CLIP_BITS.index(bits)]


def test_the_methods_are_these():
    assert {case.method for case in CASES} == set(METHODS)


def test_full_keeps_everything_exact():
    plan = build("full", {}).plan(0, GEOMETRY, None)
    for stream in (plan.keys, plan.values):
        assert (type(stream.transform), type(stream.codec), stream.schedule) == (Identity, Exact, SlidingResidual(0))


def test_kivi_from_the_prompt():
    plan = build("kivi", {"bits": 3, "group": 16, "residual": 64}).plan(0, GEOMETRY, None)
    assert type(plan.keys.transform) is type(plan.values.transform) is Identity
    assert (plan.keys.codec.bits, plan.keys.codec.group, plan.keys.codec.clip) == (3, (16, 1), 1.0)
    assert (plan.values.codec.bits, plan.values.codec.group, plan.values.codec.clip) == (3, (1, 16), 1.0)
    assert (plan.keys.schedule, plan.values.schedule) == (Blocks(64), SlidingResidual(64))


def test_rtn_from_the_prompt():
    plan = build("rtn", {}).plan(1, GEOMETRY, None)
    for stream in (plan.keys, plan.values):
        assert (stream.codec.bits, stream.codec.group, stream.codec.clip) == (4, (1, None), 1.0)
        assert (type(stream.transform), stream.schedule) == (Identity, SlidingResidual(0))


@pytest.mark.parametrize("layer", [0, 1])
def test_an_artifact_gives_each_head_its_clip(artifact, layer):
    kivi = build("kivi", {"bits": 2}).plan(layer, GEOMETRY, artifact)
    rtn = build("rtn", {"bits": 3}).plan(layer, GEOMETRY, artifact)
    expected = [
        (kivi.keys, "keys.clip.32x1", 2),
        (kivi.values, "values.clip.1x32", 2),
        (rtn.keys, "keys.clip.1x*", 3),
        (rtn.values, "values.clip.1x*", 3),
    ]
    for stream, name, bits in expected:
        assert stream.codec.clip.shape == (2, 1, 1)
        assert torch.equal(stream.codec.clip.flatten(), clip(artifact, name, bits, layer))
    said = build("kivi", {"bits": 2, "clip": 0.75}).plan(layer, GEOMETRY, artifact)
    assert said.keys.codec.clip == said.values.codec.clip == 0.75


def test_a_group_of_kivi_that_does_not_suit_the_heads_is_told_first(artifact):
    """And not that the artifact has no clip factor for it, which no fit could measure."""
    with pytest.raises(ValueError, match="a group of 64 channels does not divide 32 channels"):
        build("kivi", {"bits": 2, "group": 64}).plan(0, GEOMETRY, artifact)


@pytest.mark.parametrize("layer", [0, 1])
def test_calibrated_kivi_takes_ranges_and_scales_from_the_artifact(artifact, layer):
    plan = build("kivi", {"bits": 2, "statistics": "calibrated"}).plan(layer, GEOMETRY, artifact)
    low, high = artifact.tensors["keys.low"][layer], artifact.tensors["keys.high"][layer]
    assert type(plan.keys.transform) is ChannelRange and plan.keys.codec.group is None
    torch.testing.assert_close(plan.keys.transform.center[:, 0], (low + high) / 2)
    torch.testing.assert_close(plan.keys.transform.half[:, 0], (high - low) / 2)
    assert torch.equal(plan.keys.codec.clip.flatten(), clip(artifact, "keys.clip.fixed", 2, layer))
    assert type(plan.values.transform) is ChannelScale and plan.values.codec.group == (1, 32)
    assert torch.equal(plan.values.transform.scale[:, 0], artifact.tensors["values.scale"][layer])
    assert torch.equal(plan.values.codec.clip.flatten(), clip(artifact, "values.clip.scaled.1x32", 2, layer))
    assert (plan.keys.schedule, plan.values.schedule) == (Blocks(128), SlidingResidual(128))


@pytest.mark.parametrize("layer", [0, 1])
def test_calibrated_rtn_takes_both_ranges_from_the_artifact(artifact, layer):
    plan = build("rtn", {"bits": 4, "statistics": "calibrated"}).plan(layer, GEOMETRY, artifact)
    for name, stream in (("keys", plan.keys), ("values", plan.values)):
        low, high = artifact.tensors[f"{name}.low"][layer], artifact.tensors[f"{name}.high"][layer]
        torch.testing.assert_close(stream.transform.center[:, 0], (low + high) / 2)
        torch.testing.assert_close(stream.transform.half[:, 0], (high - low) / 2)
        assert torch.equal(stream.codec.clip.flatten(), clip(artifact, f"{name}.clip.fixed", 4, layer))
        assert stream.codec.group is None and stream.schedule == SlidingResidual(0)


# --- by importance --------------------------------------------------------------------------------------------------


def stages(plan) -> list[tuple]:
    """Bits, group and transform of keys and then values, for each tier."""
    found = []
    for tier in plan.tiers:
        for _, stage in tier.streams():
            codec = getattr(stage.codec, "uniform", stage.codec)
            own = (16, None) if isinstance(codec, Exact) else (codec.bits, codec.group)
            found.append((*own, type(stage.transform)))
    return found


def test_zipcache_is_channelwise_keys_and_channel_separable_values():
    plan = build("zipcache", {}).plan(0, GEOMETRY, None)
    # The prompt's tiers: keys have a range per channel over the tier's own tokens, values a scale and zero point per token.
    first = [own for bits in (4, 2) for own in ((bits, None, MeasuredRange), (bits, (1, None), MeasuredScale))]
    # Tiers of blocks store these numbers beside the codes, in a page for each block.
    blocks = [own for bits in (4, 2) for own in ((bits, (None, 1), Identity), (bits, (1, None), Identity))]
    assert stages(plan) == first + blocks and plan.kinds == 2
    assert [(tier.segments, tier.page_tokens) for tier in plan.tiers[2:]] == [("page", 60), ("page", 40)]
    assert plan.tiering == RatioTiers((0.6, 0.4), 100, separate_prompt_tiers=2)
    assert (plan.saliency, plan.oracle_share, plan.probes) == (Normalised(), None, Probes("random+recent", 0.1))
    scales = [tier.values.transform for tier in plan.tiers[:2]] + [tier.values.codec for tier in plan.tiers[2:]]
    assert [own.over for own in scales] == ["chunk"] * 4 and not any(own.frozen for own in scales[:2])
    assert [tier.keys.transform.over for tier in plan.tiers[:2]] == ["tier", "tier"]
    frozen = build("zipcache", {"refresh": False}).plan(0, GEOMETRY, None)
    assert stages(frozen) == first and frozen.tiering == RatioTiers((0.6, 0.4), 100)
    assert all(tier.values.transform.frozen for tier in frozen.tiers)


def test_zipcache_by_its_options():
    own = build("zipcache", {"value_scale": "tier", "saliency": "accumulated", "clip": 0.9}).plan(0, GEOMETRY, None)
    assert own.saliency == Accumulated() and own.tiers[0].values.transform.over == own.tiers[2].values.codec.over
    assert own.tiers[0].values.transform.over == "tier" and not own.shared_across_heads
    quantisers = [getattr(codec, "uniform", codec) for codec in own.codecs()]
    assert {codec.clip for codec in quantisers} == {0.9} and not any(codec.across_heads for codec in quantisers)
    layer = build("zipcache", {"salient_set": "layer", "scope": "layer"}).plan(0, GEOMETRY, None)
    values = [getattr(tier.values.codec, "uniform", tier.values.codec) for tier in layer.tiers]
    assert layer.shared_across_heads and layer.joins_heads and all(codec.across_heads for codec in values)


def test_zipcache_has_any_tiers():
    plan = build("zipcache", {"tiers": [[16, 0.1], [8, 0.2], [1, 0.3], [0, 0.4]], "recompress": 7}).plan(
        0, GEOMETRY, None
    )
    # Evicted tokens (0 bits) have no tier.
    assert [bits for bits, _, _ in stages(plan)] == 2 * [16, 16, 8, 8, 1, 1]
    assert plan.tiering == RatioTiers((0.1, 0.2, 0.3, 0.4), 7, separate_prompt_tiers=3)
    assert stages(plan)[0][2] is Identity and [tier.page_tokens for tier in plan.tiers[3:]] == [1, 1, 2]
    divided = build("zipcache", {"ratio": 0.75}).plan(0, GEOMETRY, None)
    assert divided.tiering == RatioTiers((0.75, 0.25), 100, separate_prompt_tiers=2)
    alone = build("zipcache", {"tiers": [[3, 1.0]]}).plan(0, GEOMETRY, None)
    assert alone.saliency is None and alone.probes is None, "with one tier there is nothing to choose"


@pytest.mark.parametrize("layer", [0, 1])
def test_calibrated_zipcache_takes_ranges_and_scales_from_the_artifact(artifact, layer):
    plan = build("zipcache", {"statistics": "calibrated"}).plan(layer, GEOMETRY, artifact)
    low, high = artifact.tensors["keys.low"][layer], artifact.tensors["keys.high"][layer]
    for tier, bits in zip(plan.tiers, (4, 2), strict=True):
        assert (tier.keys.codec.bits, tier.keys.codec.group, tier.values.codec.group) == (bits, None, (1, None))
        torch.testing.assert_close(tier.keys.transform.center[:, 0], (low + high) / 2)
        torch.testing.assert_close(tier.keys.transform.half[:, 0], (high - low) / 2)
        assert torch.equal(tier.values.transform.scale[:, 0], artifact.tensors["values.scale"][layer])


def test_mikv_is_balanced_keys_in_groups_of_half_a_head():
    plan = build("mikv", {}).plan(0, GEOMETRY, None)
    retained = [(2, (1, 16), MeasuredBalancer), (2, (1, 16), Identity)]
    assert stages(plan) == [(16, None, Identity), (16, None, Identity), *retained]
    assert (plan.tiering, plan.saliency, plan.probes) == (HeavyHitterBudget(ratio=0.2), Accumulated(), None)
    plan = build("mikv", {"important": 8, "retained": 3, "group": 8, "clip": 0.8}).plan(0, GEOMETRY, None)
    assert [own[:2] for own in stages(plan)] == [(8, (1, 8))] * 2 + [(3, (1, 8))] * 2
    assert [own[2] for own in stages(plan)] == [MeasuredBalancer, Identity] * 2
    assert {stage.codec.clip for tier in plan.tiers for _, stage in tier.streams()} == {0.8}
    plain = build("mikv", {"important": 4, "balancer": False}).plan(0, GEOMETRY, None)
    assert {own[2] for own in stages(plain)} == {Identity}


def test_mikv_budgets_in_tokens():
    assert build("mikv", {"budget": 9}).plan(0, GEOMETRY, None).tiering == HeavyHitterBudget(heavy=4, recent=5)
    assert build("mikv", {"budget": 9, "recent": 9}).plan(0, GEOMETRY, None).tiering == HeavyHitterBudget(
        heavy=0, recent=9
    )
    assert build("mikv", {"recent": 3}).plan(0, GEOMETRY, None).tiering.sizes(50) == (7, 3)


@pytest.mark.parametrize("layer", [0, 1])
def test_calibrated_mikv_takes_the_balancer_from_the_artifact(artifact, layer):
    options = {"important": 4, "statistics": "calibrated"}
    plan = build("mikv", options).plan(layer, GEOMETRY, artifact)
    for tier in plan.tiers:
        assert torch.equal(tier.keys.transform.balance[:, 0], artifact.tensors["keys.balancer"][layer])
        assert type(tier.values.transform) is Identity
    plain = build("mikv", options | {"balancer": False}).plan(layer, GEOMETRY, artifact)
    assert {own[2] for own in stages(plain)} == {Identity}


def test_h2o_streaming_llm_and_oracle_are_exact():
    exact = [(16, None, Identity)] * 2
    h2o = build("h2o", {"heavy": 0.3, "recent": 7}).plan(0, GEOMETRY, None)
    assert stages(h2o) == exact and h2o.tiering == HeavyHitterBudget(0.3, 7) and h2o.saliency == Accumulated()
    streaming = build("streaming_llm", {"sinks": 2, "window": 9}).plan(0, GEOMETRY, None)
    assert stages(streaming) == exact * 2 and streaming.tiering == Sinks(2, 9) and streaming.saliency is None
    assert [tier.relocated for tier in streaming.tiers] == [True, False] and streaming.relocates
    assert not build("streaming_llm", {"positions": "original"}).plan(0, GEOMETRY, None).relocates
    oracle = build("oracle", {"ratio": 0.3}).plan(0, GEOMETRY, None)
    assert stages(oracle) == exact and oracle.tiering == RatioTiers((1.0,), 1) and oracle.oracle_share == 0.3


def test_tiers_hold_groups_of_one_token_that_divide_the_head(model):
    stage = TierStages(Identity(), UniformQuant(2, (4, 1)))
    plan = TieredPlan((TierPlan(stage, stage),), RatioTiers((1.0,), 8))
    with pytest.raises(
        ValueError, match="keys: a tier's tokens are encoded one by one, got a group of 4 tokens; use 1"
    ):
        plan.check(32, torch.float32)


def rounded(x: np.ndarray, bits: int, factor: float = 1.0) -> np.ndarray:
    """One group through the uniform quantiser, its two parameters stored in 16 bits."""
    scale, zero = (float(np.float16(number)) for number in oracle.parameters(x, bits, factor))
    return oracle.codes_at(oracle.level(x, np.array(scale), np.array(zero)), bits) * scale + zero


@pytest.mark.parametrize("length", [31, 32, 100, 250])
def test_a_row_holds_what_the_papers_formulas_say(model, artifact, length):
    """KIVI at 2 bits with R = g = 32: what caches store, against the formulas on the raw keys and values."""
    tokens = Tokens.random(model, length, seed=12)
    clipped, calibrated = (BY_NAME[name].open(model) for name in ("kivi-2-clipped", "kivi-2-calibrated"))
    for cache in (clipped, calibrated):
        cache.release()
        feed(cache, [tokens])
    for layer in range(2):
        keys, values = tokens.keys[layer].double().numpy(), tokens.values[layer].double().numpy()
        factors = {
            form: clip(artifact, form, 2, layer).tolist()
            for form in ("keys.clip.32x1", "values.clip.1x32", "keys.clip.fixed", "values.clip.scaled.1x32")
        }
        low, high = (artifact.tensors[f"keys.{side}"][layer].double().numpy() for side in ("low", "high"))
        scale = artifact.tensors["values.scale"][layer].double().numpy()
        expected = {"clipped": (keys.copy(), values.copy()), "calibrated": (keys.copy(), values.copy())}
        for head in range(2):
            for start in range(0, length - length % 32, 32):  # the newest L mod R keys stay exact
                for channel in range(32):
                    here = (head, slice(start, start + 32), channel)
                    expected["clipped"][0][here] = rounded(keys[here], 2, factors["keys.clip.32x1"][head])
                    center, half = (high[head, channel] + low[head, channel]) / 2, (high - low)[head, channel] / 2
                    reach = factors["keys.clip.fixed"][head]
                    code = oracle.codes_at(((keys[here] - center) / half + reach) / (2 * reach / 3) + 0.5, 2)
                    expected["calibrated"][0][here] = (code * 2 * reach / 3 - reach) * half + center
            for token in range(length - 32):  # exactly the last R values stay exact
                expected["clipped"][1][head, token] = rounded(values[head, token], 2, factors["values.clip.1x32"][head])
                expected["calibrated"][1][head, token] = scale[head] * rounded(
                    values[head, token] / scale[head], 2, factors["values.clip.scaled.1x32"][head]
                )
        for name, cache in (("clipped", clipped), ("calibrated", calibrated)):
            for found, right in zip(oracle.contents(cache)[layer][0][:2], expected[name], strict=True):
                # Equal but for the odd value at the border of two codes, which float32 may put on the other side.
                wrong = np.abs(found.numpy() - right) > STORED
                assert wrong.mean() < ODD_CODES, (name, layer, wrong.sum())


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((UniformQuant(2, (48, 1)), Blocks(96)), (Exact(), SlidingResidual(96)), "48 tokens does not divide a page"),
        ((UniformQuant(2, (32, 1)), Blocks(40)), (Exact(), SlidingResidual(40)), "no whole number of groups of 32"),
        (
            (UniformQuant(2, (32, 1)), SlidingResidual(31)),
            (Exact(), SlidingResidual(64)),
            "no whole number of groups of 32",
        ),
        ((Exact(), SlidingResidual(64)), (Exact(), SlidingResidual(32)), "values would be encoded before the keys"),
        ((Exact(), Blocks(64)), (Exact(), SlidingResidual(32)), "values would be encoded before the keys"),
    ],
)
def test_compositions_that_pages_cannot_hold_are_refused(keys, values, message):
    with pytest.raises(ValueError, match=message):
        LayerPlan(*(StreamPlan(Identity(), codec, schedule) for codec, schedule in (keys, values)))
