"""Training dictionaries: better than their centroids, the same however often, interrupted or shared out."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from toy_dictionaries import ATOMS, OPTIONS, SPARSITY, draw, fit, make_trainer, same, task, tasks, vectors

from calib.errors import RunError, UsageError
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


def test_a_dictionary_depends_on_the_seed_and_its_own_task_alone(straight, tmp_path):
    assert same(fit(tmp_path), straight)
    assert same(fit(tmp_path, tasks()[1:2]), {"keys.1": straight["keys.1"]})
    assert not same(fit(tmp_path, tasks()[1:2], seed=1), {"keys.1": straight["keys.1"]})
    renamed = replace(tasks()[1], name="keys.7")
    assert not torch.equal(fit(tmp_path, [renamed])["keys.7"].atoms, straight["keys.1"].atoms)


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


class Cut(RuntimeError):
    pass


class CutAfter(Callback):
    """Fails after so many steps of the Trainer (8 make an epoch), like a process that ends there."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.steps:
            raise Cut


@pytest.mark.parametrize("steps", [3, 8, 13, 31])
def test_an_interrupted_run_resumes_to_the_same_bits(straight, tmp_path, steps):
    with pytest.raises(Cut):
        fit(tmp_path, make=lambda stage, callbacks: make_trainer(stage, [*callbacks, CutAfter(steps)]))
    assert (tmp_path / "dictionaries.ckpt").exists() == (steps >= 8)
    run = []

    class Counted(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            run.append(batch)

    found = fit(tmp_path, resume=True, make=lambda stage, callbacks: make_trainer(stage, [*callbacks, Counted()]))
    assert run == list(range(steps // 8 * 8, 32))
    assert same(found, straight)


def test_a_killed_process_resumes_to_the_same_bits(straight, tmp_path):
    code = (
        "import sys, time, pathlib; from toy_dictionaries import fit\n"
        "from calib.neural_dict.module import NeuralDictionaries as M; step = M.training_step\n"
        "def slow(self, number, i): step(self, number, i); time.sleep(0.1 if number > 8 else 0)\n"
        "M.training_step = slow; fit(pathlib.Path(sys.argv[1]))"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths})
    deadline = time.monotonic() + 60
    while not (tmp_path / "dictionaries.ckpt").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert same(fit(tmp_path, resume=True), straight)


def test_a_finished_run_is_not_run_again_and_a_new_one_starts_anew(straight, tmp_path):
    fit(tmp_path)

    def none(*_):
        pytest.fail("a finished run was run again")

    assert same(fit(tmp_path, resume=True, make=none), straight)
    with pytest.raises(Cut):
        fit(tmp_path, make=lambda stage, callbacks: make_trainer(stage, [*callbacks, CutAfter(0)]))
    assert not (tmp_path / "dictionaries.ckpt").exists()


TWO = """
import pathlib, sys, torch
from calib.fit.processes import MergingStrategy
from toy_dictionaries import fit, make_trainer, tasks
from torch import distributed
found = fit(
    pathlib.Path(sys.argv[1]), tasks()[: int(sys.argv[2])], resume=True,
    make=lambda stage, callbacks: make_trainer(stage, callbacks, devices=2, strategy=MergingStrategy()),
)
torch.save({name: vars(one) for name, one in found.items()}, f"{sys.argv[1]}/{distributed.get_rank()}.pt")
"""


@pytest.mark.parametrize("groups", [3, 1])
def test_two_processes_give_what_one_gives_each_of_them_all(straight, tmp_path, groups):
    """With one group the second process has none; the run of three goes on where a single process was cut."""
    if groups == 3:
        with pytest.raises(Cut):
            fit(tmp_path, make=lambda stage, callbacks: make_trainer(stage, [*callbacks, CutAfter(20)]))
    script = tmp_path / "two.py"  # Lightning starts the second process by running this file again
    script.write_text(TWO)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path), str(groups)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    wanted = {one.name: straight[one.name] for one in tasks()[:groups]}
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert list(found) == list(wanted)
        for name, one in found.items():
            assert torch.equal(one["atoms"], wanted[name].atoms)
            assert {key: one[key] for key in ("loss", "initial_loss", "epochs", "dead")} == {
                key: getattr(wanted[name], key) for key in ("loss", "initial_loss", "epochs", "dead")
            }
    assert same(fit(tmp_path, tasks()[:groups], resume=True), wanted)  # the checkpoint holds all groups too


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


def test_curves_of_every_group_are_logged_by_epoch_also_when_resumed(tmp_path, straight):
    def make(*more):
        logger = CSVLogger(tmp_path, name="log", version=len(more))
        return lambda stage, callbacks: make_trainer(stage, [*callbacks, *more], logger=logger, log_every_n_steps=1)

    with pytest.raises(Cut):
        fit(tmp_path, make=make(CutAfter(17)))
    fit(tmp_path, resume=True, make=make())
    rows = {}
    for version in (1, 0):
        with (tmp_path / f"log/version_{version}/metrics.csv").open() as file:
            rows |= {int(row["step"]): row for row in csv.DictReader(file)}
    assert sorted(rows) == [0, 1, 2, 3, 4]
    for name, one in straight.items():
        losses = [float(rows[epoch][f"dictionaries/{name}/validation"]) for epoch in range(5)]
        assert losses[0] == pytest.approx(one.initial_loss)
        assert min(losses) == pytest.approx(one.loss)
        for figure in ("loss", "diversity", "beta", "dead"):
            assert all(float(rows[epoch][f"dictionaries/{name}/{figure}"]) >= 0 for epoch in range(1, 5))
        assert 0 < float(rows[1][f"dictionaries/{name}/beta"]) <= 1


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
    others = [place for place in range(ATOMS) if not 5 <= place < 9]
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


def test_checkpoints_of_other_settings_or_damaged_are_refused_in_one_line(tmp_path):
    fit(tmp_path)
    with pytest.raises(UsageError, match=r"had data\.length = 64, now it is 65: give it the same settings"):
        fit(tmp_path, resume=True, plan={"data.length": 65})
    with pytest.raises(RunError, match="cannot be read"):
        fit(tmp_path, tasks()[:2], resume=True)
    path = tmp_path / "dictionaries.ckpt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"cannot be read \(.*\); start anew without --ckpt_path last"):
        fit(tmp_path, resume=True)
