"""The loss curve of `klt`, measured through its cache; and what tensors of a transform an artifact may hold."""

import pytest
import torch
from live_tensors import live_tensors
from toy_artifact import toy_artifact, toy_model, toy_tensors

from calib.fit.loss_curve import BITS, loss_curve
from calib.runtime import ArtifactError
from calib.runtime.artifact.components import Coding, allocator
from calib.runtime.artifact.tensor_registry import calibrator_of


@pytest.mark.full
def test_losses_are_divergences_behind_a_coded_prefix():
    """One row for each possible budget, with the errors that its allocation predicts, of sixteen sequences at most."""
    model, artifact = toy_model(), toy_artifact()
    tokens = torch.randint(3, 64, (18, 64), generator=torch.Generator().manual_seed(0))
    budgets = [bits for bits in BITS if bits >= 1]  # heads of 8 channels have no narrower words
    curves = {}
    for rope, name in (("before", "klt.before.loss"), ("after", "klt.loss")):
        ((own, found),) = loss_curve(model, artifact, tokens, rope=rope).items()
        assert own == name and found.shape == (len(budgets), 2) and found.dtype == torch.float32
        assert bool((found.diff(dim=0) >= 0).all()) and bool((found > 0).all())
        errors = sorted(allocator(artifact, Coding(rope)).at_bits(bits).error for bits in budgets)
        assert found[:, 0].tolist() == pytest.approx(errors)
        curves[rope] = found
    assert not torch.equal(*curves.values())
    unsaid, fewer, too_few = (
        loss_curve(model, artifact, some)["klt.before.loss"] for some in (tokens, tokens[:16], tokens[:15])
    )
    assert torch.equal(unsaid, curves["before"]) and torch.equal(fewer, unsaid)  # no more than 16 are used
    assert not torch.equal(too_few, unsaid)
    # Where a model's RoPE cannot be unrotated, components are of keys after it.
    rest = {name: tensor for name, tensor in artifact.tensors.items() if "before" not in name}
    (found,) = loss_curve(model, toy_artifact(tensors=rest), tokens).items()
    assert found[0] == "klt.loss" and torch.equal(found[1], curves["after"])


@pytest.mark.full
def test_what_was_said_is_held_for_one_sequence_at_a_time():
    """With a large vocabulary these distributions are the largest tensors of the stage."""
    model, artifact, held = toy_model(), toy_artifact(), []
    tokens = torch.randint(3, 64, (6, 64), generator=torch.Generator().manual_seed(0))
    model.register_forward_pre_hook(lambda *_: held.append(live_tensors()[1]))
    most = []
    for sequences in (2, 6):
        held.clear()
        loss_curve(model, artifact, tokens[:sequences], bits=(4.0, 2.0))
        most.append(max(held))
    of_one = 4 * (tokens.shape[1] // 4) * model.config.vocab_size
    assert most[1] - most[0] < of_one + tokens.nbytes


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("keys.klt.steps", lambda x: -x, r"expected 1e-24 to 1e\+12"),
        ("values.klt.errors", lambda x: x.flip(-1), "increases with bits or from component to component"),
        ("values.klt.errors", lambda x: x.flip(-2), "increases with bits or from component to component"),
        ("keys.klt.before.basis", lambda x: x * torch.tensor([0.0] + [1.0] * 7)[:, None], "is 0 in row 0 at layer 0"),
        ("keys.klt.mean", lambda x: x[..., :4], "expected torch.float32"),
        ("klt.loss", lambda x: x[:, :1], "expected torch.float32"),
        ("klt.before.loss", lambda x: -x, r"expected 0 to 1e\+12"),
        ("klt.loss", lambda x: x.flip(0), "falls from one budget to the next"),
    ],
)
def test_other_tensors_of_a_transform_are_refused(name, change, said):
    tensors = toy_tensors()
    with pytest.raises(ArtifactError, match=said):
        toy_artifact(tensors=tensors | {name: change(tensors[name]).contiguous()})
    del tensors["values.klt.mean"]
    with pytest.raises(ArtifactError, match=r"'values\.klt\.basis' is present and 'values\.klt\.mean' is not"):
        toy_artifact(tensors=tensors)


def test_every_name_says_who_measures_it():
    assert calibrator_of("keys.klt.before.steps") == "components"
    assert calibrator_of("klt.loss") == calibrator_of("klt.before.loss") == "loss_curve"
    assert calibrator_of("keys.klt.other") is None
