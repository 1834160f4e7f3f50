"""What `klt` needs of a fit, each statistic against its definition in float64: moments, bases, steps, errors."""

import math
from dataclasses import replace

import pytest
import torch
from toy_language_model import SIZES, toy_model
from toy_layer_sample import SHAPE, rows_of, sample

from calib.capture.output_projection import output_weights
from calib.capture.sample import SINKS
from calib.capture.shape import Shape
from calib.runtime.rotation import Rotation
from calib.statistics.components import FACTORS, GAUSSIAN, SHIFT, SIZED_FACTORS, Components
from calib.statistics.second_moments import SecondMoments
from calib.statistics.sensitivity import Sensitivity, size_of_rest
from calib.statistics.shrinkage import shrunk
from calib.statistics.transform_basis import bases, scaled, traced, water_level
from calib.statistics.transformed_streams import rotation_of

TURN = Rotation(torch.tensor([0.3, 0.05, 0.007, 0.001], dtype=torch.float64))  # of 8 of the 32 channels


def seen(statistic, *samples):
    for one in samples:
        statistic.observe(one)
    return statistic


def turn(position: int) -> torch.Tensor:
    """Return the matrix by which RoPE multiplies a vector at `position`, float64."""
    found = torch.eye(32, dtype=torch.float64)
    for i, frequency in enumerate(TURN.frequencies.tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        found[i, i] = found[i + 4, i + 4] = cos
        found[i, i + 4], found[i + 4, i] = -sin, sin
    return found


def real(one, least=SINKS):
    """Return row, index in the row and RoPE position of the real tokens from position `least` on."""
    return [
        (row, t, int(one.positions[row, t]))
        for row in range(len(one.mask)) for t in range(one.mask.shape[1])
        if bool(one.mask[row, t]) and int(one.positions[row, t]) >= least
    ]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return toy_model()


def test_moments_token_by_token():
    one = sample(tokens=24, padding=(0, 7))
    one.keys[1, :, :7] = one.values[1, :, :7] = one.queries[1, :, :7] = 1e9
    found = seen(SecondMoments(SHAPE, TURN), one)
    for head in range(2):
        vectors = {0: [], 1: [], 2: []}
        asked = {0: [], 1: []}
        for row, t, position in real(one):
            k, v = one.keys[row, head, t].double(), one.values[row, head, t].double()
            for number, x in enumerate((k, v, turn(position).T @ k)):
                vectors[number].append(x)
            for query in (2 * head, 2 * head + 1):
                q = one.queries[row, query, t].double()
                asked[0].append(q)
                asked[1].append(turn(position).T @ q)
        for number, rows in vectors.items():
            x = torch.stack(rows)
            torch.testing.assert_close(found.mean()[number, 0, head], x.mean(0), rtol=1e-5, atol=1e-5)
            covariance = torch.cov(x.T, correction=0)
            torch.testing.assert_close(found.covariance()[number, 0, head], covariance, rtol=1e-5, atol=1e-4)
        for number, rows in asked.items():
            x = torch.stack(rows)
            torch.testing.assert_close(found.asked()[number, 0, head], x.T @ x / len(x), rtol=1e-5, atol=1e-4)
    assert not found.mean()[:, 1].any()  # a layer without samples


@pytest.mark.parametrize("make", [SecondMoments, Sensitivity], ids=lambda one: one.__name__)
def test_parts_merge_into_the_whole(make):
    one = sample(batch=5, tokens=20, padding=(0, 3, 0, 9))
    parts = (one, rows_of(one, slice(0, 2)), rows_of(one, slice(2, None)))
    one, begin, end = (replace(part, taken_at=part) for part in parts)
    whole, first, second = (make(SHAPE, TURN) for _ in range(3))
    seen(whole, one)
    first.merge(seen(second, begin))
    seen(first, end)
    for name in whole.reductions:
        torch.testing.assert_close(getattr(first, name), getattr(whole, name), rtol=1e-12, atol=1e-9)
    first.clear()
    assert not any(getattr(first, name).any() for name in first.reductions)


def test_values_go_with_keys_before_rope():
    one = sample(batch=3, tokens=30, padding=(0, 4, 9))
    found = seen(SecondMoments(SHAPE, TURN), one).values_by_keys()
    for head in range(2):
        pairs = [
            (one.values[row, head, t].double(), turn(position).T @ one.keys[row, head, t].double())
            for row, t, position in real(one)
        ]
        values, keys = (torch.stack(part) for part in zip(*pairs, strict=True))
        wanted = (values - values.mean(0)).T @ (keys - keys.mean(0)) / len(keys)
        torch.testing.assert_close(found[0, head], wanted, rtol=1e-5, atol=1e-4)


def test_a_model_whose_rope_cannot_be_turned_back_has_no_keys_before_it():
    one = sample(tokens=12)
    found = seen(SecondMoments(SHAPE, None), one)
    assert torch.equal(found.total, seen(SecondMoments(SHAPE, TURN), one).total[:2])
    assert len(found.asked()) == 1


def test_sensitivities_turn_back_like_what_they_are_taken_by():
    one = sample(tokens=16, padding=(0, 5))
    found = seen(Sensitivity(SHAPE, TURN), replace(one, taken_at=one)).mean()
    for head in range(2):
        sums = [torch.zeros(32, 32, dtype=torch.float64) for _ in range(3)]
        for row, t, position in real(one, 0):
            k, v = one.keys[row, head, t].double(), one.values[row, head, t].double()
            for total, x in zip(sums, (k, v, turn(position).T @ k), strict=True):
                total += torch.outer(x, x) / 2  # sequences
        for number, total in enumerate(sums):
            torch.testing.assert_close(found[number, 0, head], total, rtol=1e-5, atol=1e-4)


def test_sensitivities_over_size_are_those_of_what_keys_leave_of_values():
    """Derivatives of a token are weighted by the size of what its key leaves of its value, squared and rounded to a power of 2."""
    one = sample(batch=2, tokens=60, padding=(0, 7))
    one.values[:, :, ::5] /= 8
    derived = replace(sample(batch=2, tokens=60, padding=(0, 7), seed=3), taken_at=one)
    found = seen(Sensitivity(SHAPE, TURN), derived)
    for head in range(2):
        total = torch.zeros(32, 32, dtype=torch.float64)
        for row in range(2):
            tokens = [(t, position) for r, t, position in real(one, 0) if r == row]
            k = torch.stack([turn(position).T @ one.keys[row, head, t].double() for t, position in tokens])
            v, g = (torch.stack([x.values[row, head, t].double() for t, _ in tokens]) for x in (one, derived))
            k, v = k - k.mean(0), v - v.mean(0)
            rest = v - k @ torch.linalg.inv(shrunk(k.T @ k / len(k))) @ (k.T @ v / len(k))
            spread = shrunk(rest.T @ rest / len(k))
            size = torch.stack([(r @ torch.linalg.inv(spread) @ r / 32).sqrt() for r in rest])
            octave = (2 * size.log2()).round().clamp(-5, 10)
            assert octave.unique().numel() > 2
            total += (g * torch.exp2(octave)[:, None]).T @ g / 2
        torch.testing.assert_close(found.sized_mean()[0, head], total, rtol=1e-5, atol=1e-4)
    same = torch.ones(1, 9, 32, dtype=torch.float64)
    assert bool(size_of_rest(same, same).isfinite().all())  # a head whose keys and values are constant


# ---- bases


def test_output_weights_are_what_the_projection_does_to_a_value(model):
    found, unread = output_weights(model, Shape.of(model))
    weight = model.model.layers[1].self_attn.o_proj.weight.double()
    error = torch.randn(32, dtype=torch.float64)
    moved = sum((weight[:, 32 * h : 32 * h + 32] @ error).square().sum() for h in (2, 3))  # of the second KV head
    assert float(error @ found[1, 1] @ error) == pytest.approx(float(moved))
    assert unread == []
    model.model.layers[0].self_attn.o_proj, kept = torch.nn.Identity(), model.model.layers[0].self_attn.o_proj
    try:
        found, unread = output_weights(model, Shape.of(model))
    finally:
        model.model.layers[0].self_attn.o_proj = kept
    assert unread == [0] and torch.equal(found[0, 1], torch.eye(32, dtype=torch.float64))


def measured(seed=0):
    one = sample(batch=4, tokens=80, seed=seed)
    mixed = one.keys @ torch.randn(32, 32, generator=torch.Generator().manual_seed(9))  # correlated channels
    one = replace(one, keys=mixed)
    output = torch.randn(2, 2, 32, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    derived = replace(
        sample(batch=4, tokens=80, seed=seed + 1), keys=sample(batch=4, tokens=80, seed=5).values, taken_at=one
    )
    return one, seen(SecondMoments(SHAPE, TURN), one), seen(Sensitivity(SHAPE, TURN), derived), output @ output.mT


def test_components_are_uncorrelated_and_their_errors_are_the_weighted_error():
    _, moments, sensitivity, output = measured()
    found, covariance = bases(moments, sensitivity, output), moments.covariance()
    papers = torch.stack([moments.asked()[0], output, moments.asked()[1]])
    share = traced(sensitivity.mean(), covariance)
    for number in range(3):
        for head in range(2):
            position = (number, 0, head)
            c, f, p, t = covariance[position], sensitivity.mean()[position], papers[position], found.transform[position]
            p = p * torch.trace(f @ c) / torch.trace(p @ c)
            assert float(share[position]) == pytest.approx(float(torch.trace(f @ c)))
            w = 0.99 * (f + p) / 2 + 0.01 * torch.trace((f + p) / 2) / 32 * torch.eye(32)
            torch.testing.assert_close(t.T @ t, w, rtol=1e-5, atol=1e-6 * float(w.abs().max()))
            spread = t @ (0.99 * c + 0.01 * torch.trace(c) / 32 * torch.eye(32)) @ t.T
            variances = spread.diagonal()
            off = spread - variances.diag()
            assert float(off.abs().max()) < 1e-5 * float(variances.max())
            assert bool((variances.diff() <= 1e-9 * variances.max()).all())
            torch.testing.assert_close(found.deviation[position].square(), (t @ c @ t.T).diagonal(), rtol=1e-6, atol=0)


def test_without_sensitivities_every_head_counts_the_same_and_nothing_seen_has_a_basis_still():
    _, moments, sensitivity, output = measured()
    for none in (None, Sensitivity(SHAPE, TURN)):
        found = bases(moments, none, output)
        weight, covariance = found.transform.mT @ found.transform, moments.covariance()
        assert traced(weight, covariance)[:, 0].flatten().tolist() == pytest.approx([1 / 8] * 6, rel=0.02)  # shrunk
    sensitivity.moment[1, 0, 0] = 0  # a head without sensitivities
    found = bases(moments, sensitivity, output)
    assert bool((torch.linalg.cond(found.transform) < 1e6).all()) and bool((found.deviation > 0).all())
    dead = scaled(torch.zeros(1, 4, 4), torch.eye(4)[None], torch.tensor([2.0]))
    assert torch.equal(dead[0], torch.eye(4) / 2)
    assert torch.equal(shrunk(torch.eye(3)), torch.eye(3))


# ---- steps and errors


def test_steps_and_errors_are_those_of_brute_force():
    one, moments, sensitivity, output = measured()
    found = bases(moments, sensitivity, output)
    whole = Components(SHAPE, TURN, lambda: found)
    second = replace(one, index=one.index + 1)
    tensors = seen(whole, one, second).tensors()
    first, parts = (Components(SHAPE, TURN, lambda: found) for _ in range(2))
    first.merge(seen(parts, second))
    for name, x in seen(first, one).tensors().items():
        torch.testing.assert_close(x, tensors[name], rtol=1e-6, atol=0)
    for stream in ("keys.klt", "values.klt", "keys.klt.before"):
        for kind, last in (("mean", ()), ("basis", (32,)), ("steps", (8,)), ("errors", (9,))):
            x = tensors[f"{stream}.{kind}"]
            assert x.shape == (2, 2, 32, *last) and x.dtype == torch.float32, (stream, kind)
        errors, steps, basis = (tensors[f"{stream}.{kind}"][0, 1] for kind in ("errors", "steps", "basis"))
        assert (
            bool((errors.diff(dim=-1) <= 0).all())
            and bool((errors[:, 0].diff() <= 0).all())
            and bool((steps > 0).all())
        )
        rows = []
        for shift, part in ((0, one), (1, second)):
            for row, t, position in real(part):
                if int(part.index[row, t]) % 3 == 0:
                    x = (part.values if stream == "values.klt" else part.keys)[row, 1, t].double()
                    rows.append(turn(position).T @ x if stream == "keys.klt.before" else x)
            assert shift or len(rows) > 50
        y = (torch.stack(rows) - tensors[f"{stream}.mean"][0, 1].double()) @ basis.double().T
        torch.testing.assert_close(errors[:, 0].double(), y.square().mean(0), rtol=1e-4, atol=0)
        deviation = found.deviation[{"keys.klt": 0, "values.klt": 1, "keys.klt.before": 2}[stream], 0, 1].tolist()
        for component in (0, 5, 31):
            for bits in (1, 3, 8):
                last = 2**bits - 1

                def error(y, step, last=last):
                    return float((((y / step + last / 2).round().clamp(0, last) - last / 2) * step - y).square().mean())

                # Deviations are not in the artifact: take that of the component whose steps to try contain the stored one.
                own = y[:, component]
                grids = [[one * GAUSSIAN[bits - 1] * factor for factor in FACTORS[SHIFT:]] for one in deviation]
                stored = float(steps[component, bits - 1])
                grid = next(g for g in grids if any(math.isclose(step, stored, rel_tol=1e-5) for step in g))
                assert float(errors[component, bits]) == pytest.approx(min(error(own, s) for s in grid), rel=2e-3)
                # The step is chosen as if one value in fifty were four times as large.
                feared = [error(own, step) + 0.02 * error(4 * own, step) for step in grid]
                assert error(own, stored) + 0.02 * error(4 * own, stored) == pytest.approx(min(feared), rel=2e-3)


def test_what_keys_leave_of_values_has_a_basis_of_its_own():
    """M is the regression of values on keys with coding noise; its residual is smaller, and its basis is from weights by size."""
    one, moments, sensitivity, output = measured()
    related = replace(
        one, values=(one.keys + 0.3 * one.values)
    )  # of keys after RoPE, so that keys before RoPE predict a part of it
    moments = seen(SecondMoments(SHAPE, TURN), related)
    found = bases(moments, sensitivity, output)
    covariance, crossed = moments.covariance(), moments.values_by_keys()
    for head in range(2):
        keys, values, cross = (part[..., 0, head, :, :] for part in (covariance[2], covariance[1], crossed))
        t, deviation = found.transform[2, 0, head], found.deviation[2, 0, head]
        theta = water_level(deviation.square(), 1.5)
        assert float((deviation.square() / theta).log2().div(2).clamp(min=0).mean()) == pytest.approx(1.5, abs=1e-6)
        back = torch.linalg.inv(t)
        noise = back @ deviation.square().minimum(theta).diag() @ back.T
        matrix = cross @ torch.linalg.inv(shrunk(keys) + noise)
        torch.testing.assert_close(found.rest.matrix[0, head], matrix, rtol=1e-6, atol=1e-9)
        left = values - matrix @ cross.T - cross @ matrix.T + matrix @ (keys + noise) @ matrix.T
        assert float(left.trace()) < 0.97 * float(values.trace())
        rest = found.rest.transform[0, head]
        f, p = sensitivity.sized_mean()[0, head], output[0, head]
        weight = shrunk((f + p * torch.trace(f @ left) / torch.trace(p @ left)) / 2)
        torch.testing.assert_close(rest.T @ rest, weight, rtol=1e-5, atol=1e-6 * float(weight.abs().max()))
        torch.testing.assert_close(
            found.rest.deviation[0, head].square(), (rest @ left @ rest.T).diagonal(), rtol=1e-5, atol=0
        )
        assert found.rest.bits[0, head].tolist() == [
            min(8, max(0, round(math.log2(float(one**2 / theta)) / 2))) for one in deviation
        ]


def test_sized_steps_and_errors_are_those_of_brute_force():
    """Tokens are divided by the root mean square of y / deviation, rounded to half octaves; so is what keys leave of values."""
    one, moments, sensitivity, output = measured()
    one = replace(one, values=one.keys + 0.3 * one.values)
    one.keys[:, :, ::7] *= 6
    moments = seen(SecondMoments(SHAPE, TURN), one)
    found = bases(moments, sensitivity, output)
    tensors = seen(Components(SHAPE, TURN, lambda: found), one).tensors()
    head, rows = 1, {"keys": [], "values": []}
    for row, t, position in real(one):
        if int(one.index[row, t]) % 3 == 0:
            rows["keys"].append(turn(position).T @ one.keys[row, head, t].double())
            rows["values"].append(one.values[row, head, t].double())
    keys, values = (torch.stack(rows[role]) for role in ("keys", "values"))

    def over_size(y, deviation):
        octave = (2 * (y / deviation).square().mean(-1, keepdim=True).sqrt().log2()).round().clamp(-5, 10)
        return torch.exp2(octave / 2)

    def quantised(y, step, bits):
        last = 2**bits - 1
        return ((y / step + last / 2).round().clamp(0, last) - last / 2) * step

    key_deviation, rest = found.deviation[2, 0, head], found.rest
    y = (keys - found.mean[2, 0, head]) @ found.transform[2, 0, head].T
    size = over_size(y, key_deviation)
    nominal = torch.zeros_like(y)
    for component, bits in enumerate(rest.bits[0, head].tolist()):
        if bits:
            step = GAUSSIAN[bits - 1] * key_deviation[component]
            nominal[:, component] = quantised(y[:, component] / size[:, 0], step, bits) * size[:, 0]
    decoded = nominal @ torch.linalg.inv(found.transform[2, 0, head]).T
    left = values - found.mean[1, 0, head] - decoded @ rest.matrix[0, head].T
    cases = {
        "keys.klt.sized": (y, key_deviation),
        "values.klt.sized": (
            (values - found.mean[1, 0, head]) @ found.transform[1, 0, head].T,
            found.deviation[1, 0, head],
        ),
        "values.klt.predicted": (left @ rest.transform[0, head].T, rest.deviation[0, head]),
    }
    for stream, (y, deviation) in cases.items():
        errors, steps = (tensors[f"{stream}.{kind}"][0, head] for kind in ("errors", "steps"))
        size = over_size(y, deviation)
        if stream == "values.klt.predicted":  # errors of these are in units of the size
            y, size = y / size, torch.ones_like(size)
        order = y.square().mean(0).argsort(descending=True)
        torch.testing.assert_close(errors[:, 0].double(), y.square().mean(0)[order], rtol=1e-3, atol=0)
        for component in (0, 9, 31):
            own = y[:, order[component]]
            for bits in (1, 3, 6):
                stored = float(steps[component, bits - 1])
                grid = [float(deviation[order[component]]) * GAUSSIAN[bits - 1] * factor for factor in SIZED_FACTORS]
                missed = [
                    float(((quantised(own / size[:, 0], step, bits) * size[:, 0]) - own).square().mean())
                    for step in grid
                ]
                assert any(math.isclose(step, stored, rel_tol=1e-5) for step in grid)
                assert float(errors[component, bits]) == pytest.approx(min(missed), rel=5e-3)


def test_heavy_tails_have_wider_steps_and_a_bit_that_harms_counts_as_useless():
    one, moments, sensitivity, output = measured()
    found = bases(moments, sensitivity, output)
    statistic = seen(Components(SHAPE, TURN, lambda: found), one)
    statistic.error[0, 0, 0, 0, 3] = statistic.error[0, 0, 0, 0, 2].max() * 2  # 4 bits worse than 3
    errors = statistic.tensors()["keys.klt.errors"][0, 0]
    assert bool((errors.diff(dim=-1) <= 0).all())
    assert int((errors[:, 3] == errors[:, 4]).sum()) == 1


def test_the_rope_of_models_is_turned_back_where_that_can_be(model):
    assert rotation_of(model) is not None
    changed = toy_model("qwen3")
    changed.model.rotary_emb.rope_type = "longrope"
    assert rotation_of(changed) is None
    assert SIZES["head_dim"] == 2 * len(rotation_of(model).frequencies)
