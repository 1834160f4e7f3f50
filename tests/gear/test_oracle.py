"""Tests of GEAR's float64 oracle: results worked out by hand, singular values, and how far mistakes are beyond the tolerance."""

from dataclasses import replace

import gear.oracle
import numpy as np
import pytest
import torch
from gear.layer import GearLayer
from gear.oracle import Spec, encode_segment
from gear.samples import real_like, spans, untie
from gear.scenarios import OUTPUT, WALKS, Scenario, run
from layer_walk import Tokens

pytestmark = pytest.mark.arithmetic

BACKBONES = {
    "kcvt": {},
    "per head": {"per_head": True},
    "kivi": {"backbone": "kivi"},
    "channel": {"backbone": "channel"},
    "uniform": {"backbone": "uniform"},
    "paper": {"variant": "paper"},
}


def test_a_channel_by_hand():
    """Eight tokens of one channel: the outliers 9 and -3 are replaced by 3, the mean of the others; the levels are 0, 2, 4, 6."""
    x = np.array([0, 9, 6, 2, 4, -3, 5, 1], dtype=float)[None, :, None]
    spec = replace(Spec.of("gear", bits=2, rank=0), outliers=0.25)
    segment = encode_segment(x, spec, "keys")
    assert segment.outliers.ravel().nonzero()[0].tolist() == [1, 5]
    assert segment.codes.ravel().tolist() == [0, 2, 3, 1, 2, 2, 3, 1]  # ties at 3, 5 and 1 go up
    assert segment.decoded.ravel().tolist() == [0, 4, 6, 2, 4, 4, 6, 2]
    assert segment.residual.ravel().tolist() == [0, 0, 0, 0, 0, 0, -1, -1]
    assert segment.delta.ravel().tolist() == [0, 5, 0, 0, 0, -7, 0, 0]
    paper = encode_segment(x, replace(spec, variant="paper", backbone="uniform"), "values")
    assert paper.decoded.ravel().tolist() == [0, 0, 6, 2, 4, 0, 6, 2]


@pytest.mark.parametrize("stream", ["keys", "values"])
@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES)
def test_outliers_are_exact_and_factors_below_the_optimum(options, stream):
    spec = Spec.of("gear", **options)
    for seed, tokens in enumerate((64, 128, 256)):
        x = real_like((2, tokens, 32), seed)
        segment = encode_segment(x, spec, stream)
        rows = {"keys": 2 * 32, "values": tokens * (2 if spec.per_head else 1)}[stream]
        length = x.size // rows
        count = x.size // 100 if spec.variant == "paper" else rows * max(1, length // 100)
        assert segment.outliers.sum() == 2 * count
        error = abs(segment.approximation - x)[segment.outliers]
        assert (error <= 2.0**-11 * abs(segment.delta[segment.outliers])).all()
        assert abs(segment.residual).max() > 0 and (segment.residual[segment.outliers] == 0).all()
        found = np.linalg.norm(segment.residual - segment.low_rank)
        assert np.linalg.norm(segment.residual - segment.optimum) < found < np.linalg.norm(segment.residual)
        whole = segment.low_rank.transpose(1, 0, 2).reshape(tokens, -1)
        matrices, rank = ([whole], 1) if spec.variant == "paper" else (segment.low_rank, 4)  # .02 of 64 channels is 1
        assert [np.linalg.matrix_rank(matrix) for matrix in matrices] == [rank] * len(matrices)


def test_shares_are_what_was_written():
    """A share of .29 of 100 is 29, though .29 * 100 < 29 in float64."""
    spec = Spec.of("gear", outliers=0.58, rank=0.29)
    assert gear.oracle.per_side(spec, 100) == 29
    assert [gear.oracle.rank_of(0.29, 100, width) for width in (200, 10, 3)] == [29, 2, 1]
    assert [gear.oracle.rank_of(4, 3, 64), gear.oracle.rank_of(0, 3, 64), gear.oracle.rank_of(70, 100, 64)] == [
        3,
        0,
        64,
    ]


def test_calibrated_outliers_are_the_first_beyond():
    """Of five entries above the high threshold, two have slots, the first by position; the other three are overflow. The only one
    below the low threshold has a slot. A calibrated basis gives the projection onto its first vectors."""
    x = np.array([5, 0, 6, -7, 9, 8, 0, 7], dtype=float)[None, :, None]
    spec = replace(Spec.of("gear"), outliers=0.5, rank=0)
    segment = encode_segment(x, spec, "keys", thresholds=(np.float64(-1), np.float64(4.5)))
    assert segment.outliers.ravel().nonzero()[0].tolist() == [0, 2, 3] and segment.overflow == 3
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((1, 4, 4)))[0]
    x = real_like((1, 20, 4), 0)
    segment = encode_segment(x, replace(spec, rank=3, outliers=0), "keys", basis=basis)
    expected = segment.residual @ basis[:, :3].mT @ basis[:, :3]
    assert abs(segment.low_rank - expected).max() < 2.0**-9 * abs(segment.residual).max()


def test_ranks_and_rounds_that_nobody_asked_for():
    def later(**options):
        return Spec.of("gear", **options).decode_rank

    assert [later(), later(rank=7), later(rank=1), later(rank=0), later(rank=0.3)] == [2, 2, 1, 0, 0.3]
    assert [later(variant="paper"), later(variant="paper", rank=4), later(rank=7, decode_rank=5)] == [0.02, 2, 5]
    assert [gear.oracle.loops(*shape) for shape in ((1000, 192), (1000, 193), (193, 193), (194, 193), (20, 512))] == [
        12,
        3,
        12,
        3,
        12,
    ]


def test_segments():
    def lengths(sizes, **options):
        return [stop - start for start, stop in spans(sizes, Spec.of("gear", **options))]

    assert lengths([130] + [1] * 45) == [130, 20, 20]
    assert lengths([7] + [1] * 52) == [20, 20]
    assert lengths([7, 40, 13]) == [20, 20, 20]
    assert lengths([19]) == []
    assert lengths([130] + [1] * 61, backbone="kivi") == [128]
    assert lengths([130] + [1] * 62, backbone="kivi") == [128, 64]
    assert lengths([63, 1], backbone="kivi") == [64]
    assert lengths([100, 28], backbone="kivi", block=32, group=16) == [96, 32]


MISTAKES = {
    "seed": {"seed": 1},
    "no low rank": {"rank": 0, "decode_rank": 0},
    "a rank more": {"rank": 5},
    "a rank more in blocks": {"decode_rank": 3},
    "an outlier more": {"outliers": 0.04},
    "no outliers": {"outliers": 0},
    "outliers of heads": {"per_head": True},
    "a token more in a block": {"block": 21},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mistakes_are_far_beyond_the_tolerance(dtype, monkeypatch):
    """Outputs of every mistaken option exceed the tolerance five times or more, also in bfloat16; the oracle computed in float32 is
    within it. Another layer's start and too few loops change decoded tokens by more than 10 times their tolerance."""
    scenario = Scenario("gear", dtype=dtype)
    sizes = WALKS[scenario.walk]
    tokens = scenario.tokens(sizes)

    def tolerances(spec: Spec, computed: type = np.float64) -> float:
        own, other, at, worst = GearLayer(scenario.spec), GearLayer(spec, dtype=computed), 0, 0.0
        for size in sizes:
            new = Tokens(*(part[:, :, at : at + size] for part in vars(tokens).values()))
            (expected,), (found,) = run(own, new, [size], 0), run(other, new, [size], 0)
            allowed = OUTPUT[dtype] * abs(expected).max() + own.slack
            worst = max(worst, (abs(found - expected).max(-1) / allowed).max())
            at += size
        return worst

    assert tolerances(scenario.spec, np.float32) < 1
    for name, changes in MISTAKES.items():
        assert tolerances(replace(scenario.spec, **changes)) > 5, name
    wrong = GearLayer(scenario.spec, layer=1)  # the start of another layer
    run(wrong, tokens, sizes, 0)
    right = GearLayer(scenario.spec, layer=0)
    run(right, tokens, sizes, 0)
    monkeypatch.setattr(gear.oracle, "CHEAP_LOOPS", 3)
    short = GearLayer(scenario.spec, layer=0)
    run(short, tokens, sizes, 0)
    for other in (wrong, short):
        for (one, _), (two, _) in zip(right.segments, other.segments, strict=True):
            assert (abs(one.approximation - two.approximation) / (2 * one.unit + 1e-9)).max() > 10


def test_untied_rows_have_one_answer():
    """After `untie` of bfloat16 keys, the last outlier and the next entry of every row differ at both ends; fewer than 1 % of the
    entries have changed, each by at most 2^-6."""
    spec, draw = Spec.of("gear"), torch.Generator().manual_seed(0)
    part = torch.randn(2, 300, 32, generator=draw).bfloat16()
    before = part.clone()
    untie(part, spec, "keys")
    ordered, count = part.float().sort(1).values, 3
    assert (ordered[:, count - 1] < ordered[:, count]).all() and (ordered[:, -count - 1] < ordered[:, -count]).all()
    was = before.float().sort(1).values
    assert ((was[:, count - 1] == was[:, count]) | (was[:, -count - 1] == was[:, -count])).any()
    assert (part != before).float().mean() < 0.01
    assert (part.float() - before.float()).abs().max() <= 2.0**-6
