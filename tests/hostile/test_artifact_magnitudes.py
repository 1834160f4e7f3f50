"""Artifacts with finite but impossible numbers: refused in one line, and computations with them terminate."""

import pytest
import torch
from one_line import message
from time_limit import time_limit
from toy_artifact import toy_artifact, toy_model, toy_tensors

from calib.cli import main
from calib.runtime import Artifact, compress
from calib.runtime.artifact.artifact import ArtifactError
from calib.runtime.artifact.component_bits import Allocator, Words
from calib.runtime.artifact.components import Coding, layer_codes, loss_at
from calib.runtime.artifact.tensor_registry import TABLE, registered

SECONDS = 20


@pytest.mark.parametrize("name", sorted(name for name in toy_tensors() if registered(name)))
def test_no_registered_tensor_takes_the_largest_numbers(name):
    tensors = toy_tensors()
    largest = torch.finfo(tensors[name].dtype).max if tensors[name].is_floating_point() else 2**62
    for value in (largest, -largest):
        with pytest.raises(ArtifactError) as caught:
            toy_artifact(tensors=tensors | {name: torch.full_like(tensors[name], value)})
        assert f"'{name}'" in message(caught) or "expected a range" in message(caught)


@pytest.mark.parametrize(
    ("name", "value"),
    [("values.scale", 1e-38), ("keys.balancer", 1e-38), ("keys.balancer", 1e6), ("keys.klt.steps", 1e-38)],
)
def test_what_is_divided_by_is_not_too_small(name, value):
    tensors = toy_tensors()
    with pytest.raises(ArtifactError, match=f"tensor '{name}' has values from") as caught:
        toy_artifact(tensors=tensors | {name: torch.full_like(tensors[name], value)})
    assert f"expected {TABLE[name].least:.6g} to {TABLE[name].most:.6g}" in message(caught)


def test_what_large_models_have_is_no_fault():
    """Large numbers that real models have are accepted: keys of Qwen reach hundreds, squares of their queries a million."""
    tensors = toy_tensors()
    for name, factor in (("keys.low", 2e3), ("keys.high", 2e3), ("queries.mean_square", 1e6), ("keys.balancer", 30)):
        tensors[name] *= factor
    for name in tensors:
        if ".outliers." in name:
            tensors[name] *= 1e3
    for stem in ("keys.klt", "keys.klt.before"):  # keys a thousand times as large, with the same errors of components
        tensors[f"{stem}.mean"] *= 1e3
        tensors[f"{stem}.basis"] /= 1e3
    model = toy_model()
    artifact = toy_artifact(model, tensors=tensors)
    with compress(model, "klt", artifact=artifact, bits=2, window=0, sinks=0, block=4) as cache:
        assert model(torch.arange(3, 40)[None], past_key_values=cache).logits.isfinite().all()


def test_predictions_that_go_with_no_keys_are_refused():
    model, tensors = toy_model(), toy_tensors()
    tensors["values.klt.predicted.matrix"] = 1e12 * tensors["values.klt.predicted.matrix"]
    artifact = toy_artifact(model, tensors=tensors)
    with pytest.raises(ArtifactError) as caught:
        compress(model, "klt", artifact=artifact, bits=2, size=True, predict=True)
    assert (
        "'values.klt.predicted.matrix' does not fit the tensors of keys at layer 0: it predicts values up to"
        in message(caught)
    )


# ---- the budget of klt


def test_errors_that_overflow_are_refused_and_not_searched_for_ever(tmp_path, capsys):
    tensors = toy_tensors()
    tensors["keys.klt.before.errors"] = torch.full_like(tensors["keys.klt.before.errors"], 3e38)
    good = toy_artifact()
    object.__setattr__(good, "tensors", {name: x.contiguous() for name, x in tensors.items()})  # as a forger writes it
    good.save(tmp_path / "a")
    with time_limit(SECONDS):
        assert main(["inspect", str(tmp_path / "a")]) == 2
    assert "'keys.klt.before.errors' has values from 3e+38 to 3e+38, expected 0 to 1e+12" in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1.0, 1e12])
@pytest.mark.parametrize("constant", [False, True])
def test_every_search_for_a_price_ends(factor, constant):
    tensors = toy_tensors()
    errors = {}
    for role in ("keys", "values"):
        own = tensors[f"{role}.klt.errors"]
        errors[role] = factor * (torch.ones_like(own) if constant else own / own.max())
    with time_limit(SECONDS):
        solver = Allocator(errors)
        assert [solver.at_bits(bits).bits <= bits for bits in (1, 2, 8)] == [True] * 3
        assert solver.at_error(1e30).bits == solver.least_bits
        two, word = solver.at_bits(2), solver.least_bits / (2 * solver.layers)
        found = solver.at_error(two.error)
        assert found.error <= two.error and found.bits <= two.bits + word


def test_a_curve_of_zeros_gives_numbers():
    """Measured losses may all be 0, whose logarithm would be -inf."""
    tensors = toy_tensors()
    for name in ("klt.before.loss", "klt.loss"):
        tensors[name] = torch.zeros(3, 2)
    artifact = toy_artifact(tensors=tensors)
    assert 0 <= loss_at(artifact, 0.0) < 1e-30
    assert 0 <= loss_at(artifact, 0.5) < 1e-30


def test_a_curve_of_one_budget_is_refused_where_it_is_read(tmp_path, capsys):
    tensors = toy_tensors()
    tensors["klt.before.loss"] = tensors["klt.before.loss"][:1].clone()
    artifact = toy_artifact(tensors=tensors)
    with pytest.raises(ValueError, match="the artifact has measured losses of 1 budgets, and interpolation needs two"):
        compress(toy_model(), "klt", artifact=artifact, loss=0.1)
    artifact.save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert "nats" not in capsys.readouterr().out


# ---- bases


def equal_rows(rows):
    return rows[..., :1, :].expand_as(rows).clone()


def nearly_equal_rows(rows):
    return equal_rows(rows) + 1e-6 * rows


@pytest.mark.parametrize("change", [equal_rows, nearly_equal_rows])
@pytest.mark.parametrize("stem", ["keys.klt.before", "values.klt"])
def test_a_basis_that_cannot_be_inverted_is_refused(change, stem):
    model, tensors = toy_model(), toy_tensors()
    tensors[f"{stem}.basis"] = change(tensors[f"{stem}.basis"])
    artifact = toy_artifact(model, tensors=tensors)
    with pytest.raises(ArtifactError, match=rf"'{stem}\.basis' cannot be inverted at layer 0, head 0") as caught:
        compress(model, "klt", artifact=artifact, bits=2, size=False)
    assert "its condition is" in message(caught) and "expected at most 1e+06" in message(caught)


@pytest.mark.parametrize(
    ("kinds", "factor", "said"),
    [
        (("basis",), 1e-17, "range of a component, in channels, is"),
        (("steps",), 1e11, "range of a component, in channels, is"),
        (("basis", "steps"), 1e-7, "standard deviation of a channel, is"),
        (("steps",), 1e-18, "standard deviation of a channel, in ranges of a component, is"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(kinds, factor, said):
    model, tensors = toy_model(), toy_tensors()
    for kind in kinds:
        tensors[f"values.klt.{kind}"] *= factor
    artifact = toy_artifact(model, tensors=tensors)
    with pytest.raises(ArtifactError, match=r"'values\.klt' are out of range at layer 0, head 0: the") as caught:
        compress(model, "klt", artifact=artifact, bits=2, size=False)
    assert said in message(caught)


def test_channels_that_never_move_stay_finite():
    """A head whose errors are all 0 has a spread of 0; a token at the mean must not become 0 times infinity."""
    tensors = toy_tensors()
    tensors["values.klt.errors"] = torch.zeros_like(tensors["values.klt.errors"])
    artifact = toy_artifact(tensors=tensors)
    transform = layer_codes(artifact, "values", 0, Words((8, 8), (1, 1)), Coding("after")).basis
    assert transform.forward(transform.mean).isfinite().all()


def test_an_artifact_at_hand_is_one_that_loads(tmp_path):
    """The same limits are checked when an artifact is made, so a saved artifact is not refused later."""
    toy_artifact().save(tmp_path / "a")
    assert Artifact.load(tmp_path / "a").tensors.keys() == toy_tensors().keys()


# ---- options that `calib tune` would have chosen


def tuned(options, budget=2.5):
    choice = {
        "method": "kivi",
        "budget": budget,
        "options": options,
        "layers": [{}, {}],
        "predicted": {},
        "measured_on": {},
    }
    return toy_artifact(provenance={"tuned": {"version": 1, "choices": [choice]}})


@pytest.mark.parametrize(
    "options", [{"residual": 2**40}, {"residual": [None] * 1000}, {"clip": "x" * 10**6}, {"group": {"a": 10**400}}]
)
def test_tuned_options_of_no_run_are_refused(options):
    with time_limit(SECONDS), pytest.raises(ArtifactError, match=r"provenance\.tuned gives 'kivi' ") as caught:
        compress(toy_model(), "kivi", artifact=tuned(options), tuned=2.5)
    message(caught)


@pytest.mark.parametrize("bits", [[None] * 1000, "a\nb", "x" * 10**6])
def test_tuned_bits_that_are_none_are_named_in_one_line(bits):
    with pytest.raises(ArtifactError, match="'kivi' options that it refuses: bits must be") as caught:
        compress(toy_model(), "kivi", artifact=tuned({"bits": bits}), tuned=2.5)
    assert message(caught).isprintable()


@pytest.mark.parametrize("budget", [10**400, -1, 1e300, "2.5"])
def test_a_budget_of_no_run_is_refused(budget):
    with pytest.raises(ArtifactError, match="its field 'budget' is malformed") as caught:
        compress(toy_model(), "kivi", artifact=tuned({}, budget), tuned=2.5)
    message(caught)
