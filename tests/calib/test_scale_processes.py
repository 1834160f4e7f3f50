"""Two processes give the artifact that one gives; when one ends, so does the other, and both go on where they were."""

import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
import torch
from fit_processes import fit_in_processes
from free_port import free_port

from calib.cli import main
from calib.fit.calibration import Calibration
from calib.fit.processes import LOST
from calib.runtime.artifact.artifact import Artifact

SMALL = [
    "--model.bits=[2]", "--model.clip_factors=[1,0.8]", "--model.query_rows=4", "--model.residual_bits=[2]",
    "--model.checkpoint_batches=1", "--data.length=64", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.logger=false",
    "--model.dictionary.samples=300", "--model.dictionary.heldout_samples=100", "--model.dictionary.epochs=2",
    "--model.dictionary.keys_sparsity=3", "--model.dictionary.values_sparsity=2",
]  # fmt: skip
# Batches of the stages: 5, 5, 3 and 3, so that one process alone has the last one; or more processes than batches.
UNEVEN = [
    "--data.batch_size=2", "--data.sequences=9", "--model.clip_sequences=5", "--data.heldout_sequences=5",
    "--model.dictionary.atoms=12",
]  # fmt: skip
FEW = [
    "--data.batch_size=1", "--data.sequences=3", "--model.clip_sequences=1", "--data.heldout_sequences=1",
    "--model.dictionary.atoms=8",
]  # fmt: skip
EDGES = 1e-3  # relative, of figures of quantised components
SUMS = 1e-12  # relative, of float64 sums of the same numbers in another order


def words(toy: Path, *more: str) -> list[str]:
    files = [f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", "--output=toy.safetensors"]
    return ["fit", *files, *SMALL, *more]


@pytest.fixture(scope="module")
def two(toy, tmp_path_factory):
    """The folder of an uninterrupted fit in two processes."""
    folder = tmp_path_factory.mktemp("two")
    for end in fit_in_processes(words(toy, *UNEVEN), folder):
        assert end.status == 0, end.errors
    return folder


def one_line(errors: str) -> str:
    """The error that a process ended with."""
    (line,) = [line for line in errors.splitlines() if line.startswith("calib: ")]
    return line


def statistics(folder: Path) -> dict[str, torch.Tensor]:
    """Return the buffers of all statistics after the last stage."""
    return torch.load(folder / "runs/toy/evaluate.ckpt", weights_only=True)["state_dict"]


@pytest.mark.full
@pytest.mark.parametrize("sizes", ["uneven", "few"])
def test_two_processes_fit_what_one_does(toy, two, tmp_path, monkeypatch, sizes):
    """Equal bits except in what is computed from float64 sums over batches, such as query energies and residual bases."""
    monkeypatch.chdir(tmp_path)
    if sizes == "few":
        two = tmp_path / "two"
        two.mkdir()
        for end in fit_in_processes(words(toy, *FEW), two):
            assert end.status == 0, end.errors
    assert main(words(toy, *(UNEVEN if sizes == "uneven" else FEW))) == 0
    mine, theirs = statistics(tmp_path), statistics(two)
    assert mine.keys() == theirs.keys()
    summed = {name for name, x in mine.items() if x.dtype == torch.float64}
    assert {name.split(".")[1] for name in summed} == {
        *("query_energy", "clip", "residual_basis", "heldout"),
        *("second_moments", "sensitivity", "components"),
    }
    for name, x in mine.items():
        if name.endswith("rows"):  # of a sample that is not full the rest is never read
            positions = mine[name.removesuffix("rows") + "priority"] < torch.iinfo(torch.int64).max
            assert torch.equal(theirs[name][positions], x[positions]), name
        else:
            # Components are quantised in a basis computed from sums: its last bit moves values at the edge between two codes.
            rtol = EDGES if ".components." in name else SUMS if name in summed else 0
            torch.testing.assert_close(theirs[name], x, rtol=rtol, atol=0)
    one, other = Artifact.load("toy.safetensors"), Artifact.load(two / "toy.safetensors")
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        bases = ".residual." in name or ".klt." in name
        loose = name == "queries.mean_square" or bases
        rtol = EDGES if name.endswith(("steps", "errors", "loss")) else 2**-22 if loose else 0
        torch.testing.assert_close(other.tensors[name], tensor, rtol=rtol, atol=1e-6 if bases else 0)
    metrics = [artifact.provenance["metrics"] for artifact in (one, other)]
    assert metrics[0]["dictionaries"] == metrics[1]["dictionaries"]
    for first, second in zip(*(found["layers"] for found in metrics), strict=True):
        assert second == pytest.approx(first, rel=SUMS, abs=0)
    assert {k: v for k, v in one.provenance.items() if k != "metrics"} == {
        k: v for k, v in other.provenance.items() if k != "metrics"
    }


@pytest.mark.full
def test_killed_again_and_again_two_processes_end_with_the_same_bytes(toy, two, tmp_path, monkeypatch, capsys):
    """A run resumes after the last batch that both had measured; the process that is not killed ends with one line."""
    monkeypatch.chdir(tmp_path)
    found = []
    for number, stage, batch in ((1, "statistics", 2), (0, "clip", 1), (1, "evaluate", 1)):
        ends = fit_in_processes(words(toy, *UNEVEN, "--ckpt_path=last"), tmp_path, (number, stage, batch))
        assert ends[number].status == -9
        assert ends[1 - number].status == 1
        assert one_line(ends[1 - number].errors) == f"calib: error: {LOST}"
        progress = torch.load(tmp_path / f"runs/toy/{stage}.ckpt", weights_only=True)["calibration"]
        found.append((progress["seen"], progress["finished"]))
    assert found == [(2, False), (1, False), (1, False)]
    capsys.readouterr()
    assert main(words(toy, *UNEVEN, "--ckpt_path=last")) == 2
    assert "had trainer.devices = 2, now it is 1: give it the same settings" in one_line(capsys.readouterr().err)
    for end in fit_in_processes(words(toy, *UNEVEN, "--ckpt_path=last"), tmp_path):
        assert end.status == 0, end.errors
    assert (tmp_path / "toy.safetensors").read_bytes() == (two / "toy.safetensors").read_bytes()


@pytest.mark.slow  # two interpreters are started, and one waits for the end of the other
@pytest.mark.parametrize("fails", [0, 1])
def test_a_process_that_fails_ends_one_that_does_not_look_up(toy, tmp_path, fails):
    """The other process is in a batch that never ends. Lightning starts the second process by running this file again."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys, time; from calib.fit.calibration import Calibration\n"
        "def step(*_):\n"
        f"    if os.environ['LOCAL_RANK'] == '{fails}': raise ValueError('the disk is on fire')\n"
        "    time.sleep(600)\n"
        "Calibration.training_step = step; from calib.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, script, *words(toy, *FEW, "--trainer.devices=2")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("calib: ")]
    assert lines == ["calib: error: the disk is on fire", f"calib: error: {LOST}"]


@pytest.mark.full
def test_a_process_that_starts_no_others_says_whom_it_waits_for(toy, tmp_path, monkeypatch):
    """In a shell that has LOCAL_RANK from a launcher Lightning starts none, and waits for half an hour without a word."""
    port = str(free_port())
    for name, value in (("LOCAL_RANK", "0"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "calib", *words(toy, *FEW, "--trainer.devices=2")]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        patience = Timer(120, run.kill)
        patience.start()
        told = next((line for line in run.stdout if "waits" in line), "")
        patience.cancel()
        run.kill()
    assert told.startswith(f"calib: waits for 1 other process at 127.0.0.1:{port}; LOCAL_RANK is set")


class PowerCut(RuntimeError):
    pass


@pytest.mark.full
def test_one_process_cut_at_every_batch_and_every_end_resumes_to_the_same_bytes(toy, tmp_path, monkeypatch):
    """Each attempt gets one batch further, or fails at the end of a stage, before that is saved."""
    monkeypatch.chdir(tmp_path)
    assert main(words(toy, *UNEVEN, "--output=straight.safetensors")) == 0
    step, end, events = Calibration.training_step, Calibration.on_train_end, []

    def one_batch(self, batch, batch_idx):
        if batch_idx == 1:
            raise PowerCut
        step(self, batch, batch_idx)
        events.append(self.stage.name)

    def second_time(self):
        if f"end of {self.stage.name}" not in events:
            events.append(f"end of {self.stage.name}")
            raise PowerCut
        end(self)

    monkeypatch.setattr(Calibration, "training_step", one_batch)
    monkeypatch.setattr(Calibration, "on_train_end", second_time)
    while main(words(toy, *UNEVEN, "--ckpt_path=last")):
        assert len(events) < 40
    batches = {"statistics": 5, "sensitivity": 5, "clip": 3, "evaluate": 3}
    assert events == [
        event for stage, count in batches.items() for event in [*[stage] * count, f"end of {stage}", stage]
    ]
    assert Path("toy.safetensors").read_bytes() == Path("straight.safetensors").read_bytes()
