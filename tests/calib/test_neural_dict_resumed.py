"""Training of dictionaries that is interrupted, or shared out over processes, gives the same bits as in one piece."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from free_port import free_port
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from toy_dictionaries import fit, make_trainer, same, tasks

from calib.errors import RunError, UsageError


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What an uninterrupted run gives."""
    return fit(tmp_path_factory.mktemp("straight"))


class Cut(RuntimeError):
    pass


class CutAfter(Callback):
    """Fails after so many steps of the Trainer (8 make an epoch), like a process that ends there."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.steps:
            raise Cut


@pytest.mark.full
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


@pytest.mark.parametrize("steps", [12, 15])
def test_a_callback_that_ends_the_training_is_refused_and_it_goes_on_without(straight, tmp_path, steps):
    class EndAfter(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop |= batch_idx == steps

    with pytest.raises(UsageError, match=r"trainer\.callbacks: one of them ended a stage early"):
        fit(tmp_path, make=lambda stage, callbacks: make_trainer(stage, [*callbacks, EndAfter()]))
    assert same(fit(tmp_path, resume=True), straight)


@pytest.mark.full
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
import faulthandler, sys
faulthandler.dump_traceback_later(200)  # shows where each of the two is, should they wait for each other in vain
import pathlib, torch
from calib.fit.processes import MergingStrategy
from toy_dictionaries import fit, make_trainer, tasks
from torch import distributed
found = fit(
    pathlib.Path(sys.argv[1]), tasks()[: int(sys.argv[2])], resume=True,
    make=lambda stage, callbacks: make_trainer(stage, callbacks, devices=2, strategy=MergingStrategy()),
)
torch.save({name: vars(one) for name, one in found.items()}, f"{sys.argv[1]}/{distributed.get_rank()}.pt")
"""


@pytest.mark.full
@pytest.mark.parametrize("groups", [3, 1])
def test_two_processes_give_what_one_gives_each_of_them_all(straight, tmp_path, groups):
    """With one group the second process has none; the run of three goes on where a single process was cut."""
    if groups == 3:
        with pytest.raises(Cut):
            fit(tmp_path, make=lambda stage, callbacks: make_trainer(stage, [*callbacks, CutAfter(20)]))
    script = tmp_path / "two.py"  # Lightning starts the second process by running this file again
    script.write_text(TWO)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(script), str(tmp_path), str(groups)]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as error:
        pytest.fail((error.stderr or b"").decode()[-8000:])
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
