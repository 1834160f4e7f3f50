"""Training of dictionaries: better than their centroids, reproducible, and independent of how groups are shared out."""

from dataclasses import replace

import pytest
import torch
from toy_dictionaries import ATOMS, OPTIONS, SPARSITY, draw, fit, same, task, tasks, vectors

from calib.errors import UsageError
from calib.kernels.matching_pursuit.reference import desparsify, matching_pursuit
from calib.neural_dict.dictionary import NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What an uninterrupted run gives."""
    return fit(tmp_path_factory.mktemp("straight"))


def relative_error(atoms, x, sparsity):
    """Mean of |x - x^|^2 / |x|^2."""
    residual = x - desparsify(*matching_pursuit(x, atoms, sparsity), atoms)
    return (residual.double().square().sum(1) / x.double().square().sum(1)).mean().item()


def test_every_group_ends_below_its_centroids_with_unit_atoms(straight):
    for one in tasks():
        found = straight[one.name]
        assert found.atoms.shape == (one.atoms, one.samples.shape[1])
        assert found.atoms.dtype == torch.float32
        assert torch.allclose(found.atoms.norm(dim=1), torch.ones(one.atoms), atol=1e-6)
        assert found.loss < 0.9 * found.initial_loss
        assert found.loss == pytest.approx(relative_error(found.atoms, one.heldout, one.sparsity), rel=1e-6)
        assert found.epochs == OPTIONS.epochs


@pytest.mark.full
def test_a_dictionary_depends_on_the_seed_and_its_own_task_alone(straight, tmp_path):
    assert same(fit(tmp_path), straight)
    assert same(fit(tmp_path, tasks()[1:2]), {"keys.1": straight["keys.1"]})
    assert not same(fit(tmp_path, tasks()[1:2], seed=1), {"keys.1": straight["keys.1"]})
    renamed = replace(tasks()[1], name="keys.7")
    assert not torch.equal(fit(tmp_path, [renamed])["keys.7"].atoms, straight["keys.1"].atoms)


@pytest.mark.full
def test_groups_trained_side_by_side_are_those_trained_alone(straight, tmp_path):
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same(fit(tmp_path), straight)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_one_batch_is_a_step_of_adam_on_the_loss_with_beta_and_then_renorm():
    """Three steps by hand, with torch's own Adam and autograd, from the same centroids."""
    one = NeuralDictionary(task(), OPTIONS, 0)
    one.begin()
    one.begin_epoch()
    atoms = one.atoms.detach().clone().requires_grad_()
    adam = torch.optim.Adam([atoms], eps=1e-12)
    before = None
    total = OPTIONS.epochs * 13  # 400 samples in batches of at most 32
    for step in range(3):
        x = one.samples[step * 32 : (step + 1) * 32]
        index, coefficient = matching_pursuit(x, atoms, SPARSITY)
        dense = torch.zeros(len(x), ATOMS).scatter_add(1, index, coefficient)
        mse = (x - dense @ atoms).square().sum(1).mean()
        penalty = (torch.eye(ATOMS) - atoms @ atoms.T).square().sum() / ATOMS**2
        before = before or (mse.item(), penalty.item())
        beta = min(0.1 * before[0] / before[1], 1.0)
        adam.param_groups[0]["lr"] = (
            OPTIONS.learning_rate * (1 + torch.tensor(torch.pi * step / total).cos().item()) / 2
        )
        adam.zero_grad()
        (mse + beta * penalty).backward()
        adam.step()
        with torch.no_grad():
            atoms /= atoms.norm(dim=1, keepdim=True)
        one.train_batch(x)
        assert one.beta.item() == pytest.approx(beta, rel=1e-5)
        torch.testing.assert_close(one.atoms, atoms, rtol=0, atol=1e-5)
        before = (mse.item(), penalty.item())


def test_without_diversity_there_is_no_penalty(straight, tmp_path):
    assert not same(fit(tmp_path, options=replace(OPTIONS, diversity=False)), straight)


def test_groups_stop_when_validation_no_longer_improves_and_stay_as_they_are(tmp_path):
    """Held-out vectors that have nothing to do with the samples: the centroids of such a group may be its best atoms."""
    first = task()
    alien = Task("keys.1", first.samples[:, :4].repeat(1, 3), vectors(100, 12, seed=9), ATOMS, SPARSITY)
    options = replace(OPTIONS, patience=1, epochs=12, learning_rate=0.05)
    found = fit(tmp_path, [first, alien], options)
    assert found["keys.1"].epochs < 12
    assert found["keys.0"].epochs >= found["keys.1"].epochs
    for one in (first, alien):
        fitted = found[one.name]
        assert fitted.loss == pytest.approx(relative_error(fitted.atoms, one.heldout, SPARSITY), rel=1e-6)
        assert fitted.loss <= fitted.initial_loss
    assert same(fit(tmp_path, [alien], options), {"keys.1": found["keys.1"]})


def test_dead_atoms_are_drawn_anew_from_the_worst_reconstructed_samples():
    one = NeuralDictionary(task(), OPTIONS, 0)
    one.begin()
    one.train_part(0, 1)
    with torch.no_grad():
        one.atoms[5:9] = one.atoms[4]  # the first of equal atoms is chosen: these never are
    one.used[:], one.used[5:9] = 1, 0
    residual = one.residual(one.samples)
    length = residual.norm(dim=1)
    worst = residual[length.topk(4).indices] / length.topk(4).values[:, None]
    kept, moments = one.atoms.detach().clone(), one.first_moment.clone()
    one.end_epoch()
    torch.testing.assert_close(one.atoms.detach()[5:9], worst, rtol=0, atol=1e-6)
    others = [position for position in range(ATOMS) if not 5 <= position < 9]
    assert torch.equal(one.atoms.detach()[others], kept[others])
    assert torch.equal(one.first_moment[others], moments[others])
    assert not one.first_moment[5:9].any() and not one.second_moment[5:9].any()
    assert one.first_moment[others].any()
    assert one.figures[3] == 4
    assert one.optimizer.state[one.atoms]["exp_avg"] is one.first_moment


def test_reseeding_revives_a_dictionary_with_many_equal_atoms(tmp_path):
    """Samples in one tight cluster but for a few: most centroids start in the cluster, and many are never chosen."""
    cluster = torch.ones(380, 12) + 1e-4 * torch.randn(380, 12, generator=draw("cluster"))
    samples = torch.cat([cluster, 0.5 * vectors(120, 12, seed=4)])
    one = Task("keys.0", samples, torch.cat([cluster[:20], 0.5 * vectors(80, 12, seed=4)]), 64, 2)
    options = replace(OPTIONS, epochs=6, diversity=False, patience=6)
    without, with_it = (fit(tmp_path, [one], replace(options, reseed=on))["keys.0"] for on in (False, True))
    assert without.dead >= 10
    assert with_it.dead < without.dead
    assert with_it.loss < 0.9 * without.loss


def test_zero_vectors_do_not_enter_the_validation_loss(tmp_path):
    first = task()
    padded = replace(first, heldout=torch.cat([first.heldout, torch.zeros(50, 12)]))
    assert same(fit(tmp_path, [first]), fit(tmp_path, [padded]))
    nothing = Task("keys.0", torch.zeros(100, 12), torch.zeros(10, 12), ATOMS, SPARSITY)
    found = fit(tmp_path, [nothing])["keys.0"]
    assert found.loss == 0
    assert torch.allclose(found.atoms.norm(dim=1), torch.ones(ATOMS), atol=1e-6)


def test_as_many_samples_as_atoms_and_fewer_than_a_batch(tmp_path):
    found = fit(tmp_path, [task(samples=ATOMS)], replace(OPTIONS, batch_size=512))["keys.0"]
    assert found.loss <= found.initial_loss
    assert found.atoms.isfinite().all()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (task(samples=ATOMS - 1), "dictionary keys.0: 32 atoms need as many samples and there are 31: give more text"),
        (task(sparsity=13), "dictionary keys.0: 13 pairs for a vector of 12 channels: must be 1 to 12"),
        (replace(task(), heldout=torch.zeros(0, 12)), "dictionary keys.0: no held-out vector to validate on"),
    ],
)
def test_tasks_that_cannot_be_trained_are_refused_in_one_line(tmp_path, broken, words):
    with pytest.raises(UsageError) as refused:
        fit(tmp_path, [broken])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("atoms", -1, "atoms=-1: must be at least 0"),
        ("batch_size", 0, "batch_size=0: must be at least 1"),
        ("epochs", 0, "epochs=0: must be at least 1"),
        ("learning_rate", float("nan"), "learning_rate=nan: must be a number, 0 or more"),
        ("delta1", -0.5, "delta1=-0.5: must be a number, 0 or more"),
        ("groups", "some", "groups='some': one of measured, layers, paper-32"),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(option, value, words):
    with pytest.raises(UsageError, match=f"^model.dictionary.{option}") as refused:
        DictionaryOptions(**{option: value})
    assert words in str(refused.value)
