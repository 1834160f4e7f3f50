"""What `kvquant` needs of a fit, against its definitions in float64: ranges before RoPE, weighted histograms, the best levels."""

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from toy_artifact import toy_artifact, toy_tensors
from toy_language_model import toy_model
from toy_layer_sample import SHAPE, rows_of, sample

from calib.capture.gradients import stream_gradients
from calib.capture.sample import LayerSample
from calib.cli import main
from calib.errors import UsageError
from calib.fit.calibration import Calibration
from calib.runtime import compress
from calib.runtime.artifact.artifact import Artifact, ArtifactError
from calib.runtime.rotation import Rotation
from calib.statistics.nuq_levels import BINS, NuqLevels
from calib.statistics.nuq_ranges import NuqRanges
from calib.statistics.weighted_levels import best_levels

TURN = Rotation(torch.tensor([0.3, 0.05, 0.007, 0.001], dtype=torch.float64))  # of 8 of the 32 channels
SHARES = (0.0, 0.1)
FIT = [
    "--model.nuq=[0,0.01]", "--model.bits=[2]", "--model.clip_factors=[1]", "--model.query_rows=4", "--model.clip_sequences=2",
    "--model.klt=false", "--model.residual_forms={keys: [], values: []}", "--model.dictionary.atoms=0", "--data.length=64",
    "--data.sequences=8", "--data.heldout_sequences=2", "--data.batch_size=2", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.logger=false",
]  # fmt: skip


def before_rope(x: torch.Tensor, position: int) -> list[float]:
    """A rotated vector of 32 channels as it was before RoPE at `position`, in float64."""
    y = x.double().tolist()
    for i, frequency in enumerate(TURN.frequencies.tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        y[i], y[i + 4] = y[i] * cos + y[i + 4] * sin, y[i + 4] * cos - y[i] * sin
    return y


def derived(tokens=40, padding=(0, 9), layer=0) -> LayerSample:
    """Return made-up derivatives and, as `taken_at`, what they are taken at; the mask has two thirds of the tokens."""
    exact = sample(tokens=tokens, padding=padding, layer=layer)
    counted = exact.mask & (exact.index % 3 > 0)
    exact = replace(exact, mask=counted)
    return replace(sample(tokens=tokens, layer=layer, seed=1), mask=counted, positions=exact.positions, taken_at=exact)


def ranges_of(one: LayerSample) -> NuqRanges:
    found = NuqRanges(SHAPE, 0, SHARES, TURN)
    found.observe(one)
    return found


def test_ranges_are_order_statistics_of_keys_before_rope_without_each_first_token():
    one = sample(padding=(0, 20))
    one.keys[1, :, :21] = one.keys[0, :, 0] = 1e9  # padding, and the first tokens behind it
    found = ranges_of(one).tensors()
    assert torch.equal(found["nuq.shares"], torch.tensor(SHARES)) and len(found) == 3
    real = [(row, t) for row in range(2) for t in range(64) if one.mask[row, t] and one.positions[row, t] > 0]
    for head in range(2):
        turned = [before_rope(one.keys[row, head, t], int(one.positions[row, t])) for row, t in real]
        for channel, keys in enumerate(zip(*turned, strict=True)):
            ordered = sorted(keys)
            for number, share in enumerate(SHARES):
                outside = math.floor(share * len(keys) / 2)
                ends = [float(found[f"keys.nuq.{end}"][0, head, channel, number]) for end in ("low", "high")]
                assert ends == pytest.approx([ordered[outside], ordered[-1 - outside]], rel=1e-5, abs=1e-6)
    assert not found["keys.nuq.low"][1].any()  # a layer without samples


def test_histograms_hold_squared_derivatives_at_normalised_values_that_are_no_outliers():
    """Against KVQuant's definition, by value. Values near a bin's border may lie in the next one: sums up to a bin are compared."""
    one = derived()
    exact, ranges = one.taken_at, ranges_of(sample(padding=(0, 9)))
    found = NuqLevels(SHAPE, ranges, TURN)
    found.observe(one)
    low, high = (ranges.tensors()[f"keys.nuq.{end}"].double() for end in ("low", "high"))
    seen = [(row, t, int(one.positions[row, t])) for row, t in one.mask.nonzero().tolist()]
    for number, share in enumerate(SHARES):
        points: list[list[tuple[float, float]]] = [[], []]
        for row, t, position in seen:
            for head in range(2):
                keys, slopes = (before_rope(x.keys[row, head, t], position) for x in (exact, one))
                for channel, (key, slope) in enumerate(zip(keys, slopes, strict=True)):
                    ends = [float(end[0, head, channel, number]) for end in (low, high)]
                    y = (2 * key - sum(ends)) / (ends[1] - ends[0])
                    if abs(y) <= 1:
                        points[0].append((y, slope**2))
            values, slopes = (x.values[row, :, t].double().flatten().tolist() for x in (exact, one))
            each = max(1, math.floor(share / 2 * len(values))) if share else 0
            order = sorted(range(len(values)), key=values.__getitem__)[each : len(values) - each]
            ends = [values[order[0]], values[order[-1]]]
            points[1] += [((2 * values[at] - sum(ends)) / (ends[1] - ends[0]), slopes[at] ** 2) for at in order]
        for stream, own in enumerate(points):
            y, weight = torch.tensor(own, dtype=torch.float64).T
            at = (stream, 0, number)
            most = float(weight.sum())
            assert float(found.weight[at].sum()) == pytest.approx(most, rel=1e-3)
            # The runtime keeps a token's range in 16 bits.
            assert float(found.moment[at].sum()) == pytest.approx(float((weight * y).sum()), abs=1e-3 * most)
            for border in range(64, BINS, 64):
                expected = float(weight[y < 2 * border / BINS - 1].sum())
                assert float(found.weight[at][:border].sum()) == pytest.approx(expected, abs=2e-3 * most)
    assert not found.weight[:, 1].any()


@pytest.mark.arithmetic
@pytest.mark.parametrize("seed", range(6))
def test_levels_are_the_best_of_all_clusterings(seed: int):
    """Every way to cut ten points into three, four or eight stretches is tried."""
    draw = torch.Generator().manual_seed(seed)
    y = (2 * torch.rand(10, generator=draw, dtype=torch.float64) - 1).sort().values
    weight = torch.rand(10, generator=draw, dtype=torch.float64) ** 4
    for count in (3, 4, 8):
        tried = {}
        for cuts in combinations(range(1, 10), count - 1):
            parts = list(zip((0, *cuts), (*cuts, 10), strict=True))
            means = [float((weight[a:b] * y[a:b]).sum() / weight[a:b].sum()) for a, b in parts]
            error = sum(
                float((weight[a:b] * (y[a:b] - mean).square()).sum()) for (a, b), mean in zip(parts, means, strict=True)
            )
            tried[error] = means
        found = best_levels(weight, weight * y, count)
        assert found.tolist() == pytest.approx(tried[min(tried)], abs=1e-6)
        assert found.dtype == torch.float32 and bool((found.diff() >= 0).all())


@pytest.mark.arithmetic
def test_levels_of_few_points_or_none_and_of_weights_that_differ_a_lot():
    none, one = torch.zeros(8, dtype=torch.float64), torch.tensor([0, 0.5, 0, 2.0, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.equal(best_levels(none, none, 4), torch.linspace(-1, 1, 4))
    assert best_levels(one, one * torch.linspace(-1, 1, 8), 4).tolist() == pytest.approx([-5 / 7, *[-1 / 7] * 3])
    wide = torch.logspace(0, -40, BINS, dtype=torch.float64)
    found = best_levels(wide, wide * torch.linspace(-1, 1, BINS, dtype=torch.float64), 16)
    assert bool(found.isfinite().all()) and bool((found.diff() >= 0).all())


def test_parts_merge_into_the_whole_and_what_is_cleared_is_as_new():
    one, ranges = derived(), ranges_of(sample())
    whole, first, second = (NuqLevels(SHAPE, ranges, TURN) for _ in range(3))
    whole.observe(one)
    for part, rows in ((first, slice(0, 1)), (second, slice(1, 2))):
        part.observe(replace(rows_of(one, rows), taken_at=rows_of(one.taken_at, rows)))
    first.merge(second)
    for name in whole.reductions:
        torch.testing.assert_close(getattr(first, name), getattr(whole, name), rtol=1e-12, atol=1e-9)
    assert len(whole.tensors()) == 6
    whole.clear()
    assert whole.tensors() == {}


def test_derivatives_say_what_they_are_taken_at():
    model, found = toy_model(), []
    ids = torch.randint(3, 259, (1, 24), generator=torch.Generator().manual_seed(0))
    stream_gradients(model, ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(24)[None], 0, found.append)
    cache = model(ids, use_cache=True).past_key_values
    for one in found:
        torch.testing.assert_close(one.taken_at.keys, cache.layers[one.layer].keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.taken_at.values, cache.layers[one.layer].values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nuq": [0.1, 0.01]}, r"model.nuq=\[0.1, 0.01\]: increasing numbers from 0 and below 1, such as \[0.01\]"),
        ({"nuq": [-0.1]}, "increasing numbers from 0"),
        ({"nuq": [1.0]}, "increasing numbers from 0"),
        ({"nuq": [math.nan]}, "increasing numbers from 0"),
        (
            {"nuq": [0.01], "sensitivity_sequences": 0},
            "levels are weighted by derivatives; give some, 16 is the default",
        ),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(options: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        Calibration("x", **options)


@pytest.mark.full
def test_a_fit_that_is_asked_writes_what_the_method_reads(toy, tmp_path, monkeypatch):
    """With two shares; test_fit.py checks that a fit without `nuq` has none of these tensors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    given = [f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", "--output=toy.calib.safetensors"]
    assert main(["fit", *given, *FIT]) == 0
    artifact = Artifact.load(Path("toy.calib.safetensors"))
    assert artifact.provenance["config"]["nuq"] == [0, 0.01]
    added = {name: list(x.shape) for name, x in artifact.tensors.items() if "nuq" in name}
    assert added == {
        "nuq.shares": [2], "keys.nuq.low": [3, 2, 32, 2], "keys.nuq.high": [3, 2, 32, 2],
        **{f"{stream}.nuq.levels.{bits}": [3, 2, 2**bits] for stream in ("keys", "values") for bits in (2, 3, 4)},
    }  # fmt: skip
    model = toy_model()
    ids = torch.randint(3, 259, (1, 60), generator=torch.Generator().manual_seed(0))
    full = model(ids).logits[:, 30:]
    off = {}
    for bits in (2, 4):
        with compress(model, "kvquant", artifact=artifact, bits=bits) as cache, torch.no_grad():
            model(ids[:, :30], past_key_values=cache)
            off[bits] = float((model(ids[:, 30:], past_key_values=cache).logits - full).abs().mean())
    assert 0 < off[4] < off[2] / 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nuq.shares", lambda x: x.flip(0), "is 0.01, 0, expected increasing numbers from 0 and below 1"),
        ("nuq.shares", lambda x: x * 0, "expected increasing numbers from 0 and below 1"),
        ("keys.nuq.low", lambda x: x + 9, "is above 'keys.nuq.high' at layer 0, head 0, channel 0, share 0"),
        ("keys.nuq.low", lambda x: x[..., :1], r"expected torch.float32 \[2, 2, 8, 2\]"),
        ("values.nuq.levels.3", lambda x: x.flip(-1), "falls at layer 0, share 0, expected rising levels"),
        ("values.nuq.levels.3", lambda x: x * 3, "expected"),
        ("values.nuq.levels.3", lambda x: x[..., :7], r"expected torch.float32 \[2, 2, 8\]"),
    ],
)
def test_an_artifact_whose_levels_or_ranges_are_none_is_refused(name: str, change, message: str):
    tensors = toy_tensors()
    toy_artifact(tensors=tensors)
    tensors[name] = change(tensors[name])
    with pytest.raises(ArtifactError, match=message):
        toy_artifact(tensors=tensors)


def test_ranges_without_their_shares_are_refused():
    tensors = toy_tensors()
    del tensors["nuq.shares"]
    with pytest.raises(ArtifactError, match=r"is present and 'nuq\.shares' is not, expected both"):
        toy_artifact(tensors=tensors)
