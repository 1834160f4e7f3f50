"""SIGTERM and SIGINT: one line that says how to go on, status 143 or 130, what was measured kept, the same bytes in the end."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from toy_pretraining import pretrain

import calib.fit.command as fit_command
from calib import cli, interrupts, log_lines
from calib.capture.data import CaptureData
from calib.cli import main
from calib.fit.calibration import Calibration
from calib.neural_dict.module import NeuralDictionaries
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.files import atomic_file
from calib.stage_checkpoint import AtomicCheckpointIO

SMALL = [
    "--model.bits=[2]", "--model.clip_factors=[1]", "--model.query_rows=2", "--model.clip_sequences=4",
    "--model.residual_forms={keys: [], values: []}", "--model.sensitivity_sequences=2", "--data.length=64",
    "--data.sequences=8", "--data.heldout_sequences=4", "--data.batch_size=2", "--model.checkpoint_batches=100",
    "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false",
    "--model.dictionary.atoms=8", "--model.dictionary.samples=300", "--model.dictionary.heldout_samples=100",
    "--model.dictionary.keys_sparsity=3", "--model.dictionary.values_sparsity=2", "--model.dictionary.epochs=2",
]  # fmt: skip
BATCHES = {"statistics": 4, "sensitivity": 1, "clip": 2, "evaluate": 2}
EVALUATION = """
model: {model}
methods: [{{name: full, method: full}}, {{name: rtn, method: rtn, bits: 4}}]
tasks: [{{task: perplexity, text: "{text}", prefill: 32, chunk: 16, length: 64, tokens: 64}}]
"""
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
HERE = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # not a shell's background
        "from calib.cli import main\n{}\nsys.exit(main(sys.argv[1:]))")  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Where the tests run in the background of a shell, Python starts with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def words(toy: Path, *more: str) -> list[str]:
    return [
        "fit",
        f"--model.path={toy / 'llama'}",
        f"--data.text={toy / 'text.txt'}",
        "--output=toy.safetensors",
        *SMALL,
        *more,
    ]


@pytest.fixture(scope="module")
def fitted(toy, tmp_path_factory):
    """The bytes of an undisturbed fit."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("undisturbed"))
    try:
        assert main(words(toy)) == 0
        return Path("toy.safetensors").read_bytes()
    finally:
        os.chdir(here)


def signalled(capfd, arguments: list[str], number: int = signal.SIGTERM) -> str:
    """Runs a command that gets a signal; returns the one line it ends with."""
    capfd.readouterr()
    handlers = [signal.getsignal(one) for one in (*STATUS, signal.SIGALRM)]
    assert main(arguments) == STATUS[number]
    assert [signal.getsignal(one) for one in (*STATUS, signal.SIGALRM)] == handlers
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    error = capfd.readouterr().err
    assert "Traceback" not in error
    (line,) = [
        line for line in error.splitlines() if "calib: interrupted" in line
    ]  # beside progress and finished cells
    assert line.startswith(f"calib: interrupted by {signal.Signals(number).name}; ")
    return line


def goes_on(line: str, program: str = "calib") -> list[str]:
    """Return the arguments of the command after "go on with" in the line."""
    command = line.partition(" go on with: ")[2]
    assert command.startswith(f"{program} ")
    return shlex.split(command.removeprefix(program))


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "batch", "number"),
    [
        ("statistics", 1, signal.SIGTERM), ("sensitivity", 0, signal.SIGINT), ("clip", 0, signal.SIGTERM),
    ],
)  # fmt: skip
def test_a_batch_under_way_is_finished_and_kept(toy, fitted, monkeypatch, capfd, stage, batch, number):
    step, run = Calibration.training_step, []

    def signalled_step(self, samples, batch_idx):
        if (self.stage.name, len(run)) == (stage, sum(list(BATCHES.values())[: list(BATCHES).index(stage)]) + batch):
            signal.raise_signal(number)
        step(self, samples, batch_idx)
        run.append(self.stage.name)

    monkeypatch.setattr(Calibration, "training_step", signalled_step)
    line = signalled(capfd, words(toy), number)
    assert not Path("toy.safetensors").exists()
    progress = torch.load(f"runs/toy/{stage}.ckpt", weights_only=True)["calibration"]
    assert progress == {"stage": stage, "seen": batch + 1, "finished": batch + 1 == BATCHES[stage]}
    assert goes_on(line) == words(toy, "--ckpt_path", "last")
    assert main(goes_on(line)) == 0
    assert run == [name for name, count in BATCHES.items() for _ in range(count)]  # each batch once over both
    assert Path("toy.safetensors").read_bytes() == fitted


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "name", "call", "checkpoints"),
    [
        (CaptureData, "load", 1, []),
        (Calibration, "begin", 3, ["sensitivity", "statistics"]),  # between two stages
        (NeuralDictionaries, "training_step", 3, list(BATCHES)),
        (fit_command, "loss_curve", 1, [*BATCHES, "dictionaries"]),
        (Artifact, "encoded", 1, [*BATCHES, "dictionaries"]),
        (atomic_file, "_fsync", 1, ["statistics"]),  # a checkpoint that is being written is written to its end
    ],
    ids=["loading", "between stages", "training", "losses", "artifact", "checkpoint"],
)
def test_a_signal_anywhere_else(toy, fitted, monkeypatch, capfd, owner, name, call, checkpoints):
    function, calls = getattr(owner, name), []

    def signalled_call(*given, **named):
        calls.append(name)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return function(*given, **named)

    monkeypatch.setattr(owner, name, signalled_call)
    line = signalled(capfd, words(toy))
    assert not Path("toy.safetensors").exists()
    runs = Path("runs/toy")
    assert sorted(file.name for file in runs.glob(".*")) == []
    assert sorted(file.stem for file in runs.glob("*.ckpt")) == sorted(checkpoints)
    assert goes_on(line) == words(toy, "--ckpt_path", "last")
    assert main(goes_on(line)) == 0
    assert Path("toy.safetensors").read_bytes() == fitted


@pytest.mark.slow
def test_pretraining_goes_on_from_its_last_validation(prose, tmp_path, monkeypatch, capfd):
    """Six steps, saved after every second; a run that has saved nothing starts again."""
    from benchmarks.embedded_model.language_model import LanguageModel
    from benchmarks.embedded_model.pretrain import PROGRAM
    from benchmarks.embedded_model.pretrain import main as pretrain_main

    straight = tmp_path / "straight"
    assert pretrain(straight, prose, "--trainer.logger=false") == 0
    step, at = LanguageModel.training_step, [0]

    def signalled_step(self, batch, batch_index):
        if self.global_step in at:
            at.clear()
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch, batch_index)

    monkeypatch.setattr(LanguageModel, "training_step", signalled_step)
    for number, wanted in ((0, f" start again with: {PROGRAM} "), (5, f" go on with: {PROGRAM} ")):
        at.append(number)
        capfd.readouterr()
        assert pretrain(tmp_path / "broken", prose, "--trainer.logger=false") == 143
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("calib: ")]
        assert wanted in line
        assert line.endswith(" --ckpt_path last") == (number == 5)
    assert pretrain_main(goes_on(line, PROGRAM)) == 0
    exported = [folder / "model/model.safetensors" for folder in (straight, tmp_path / "broken")]
    assert exported[0].read_bytes() == exported[1].read_bytes()


def test_an_evaluation_keeps_its_cells(toy, tmp_path, monkeypatch, capfd):
    from calib.evaluate.cell import Cell

    Path("eval.yaml").write_text(EVALUATION.format(model=toy / "llama", text=toy / "text.txt"))
    measure, measured = Cell.measure, []

    def signalled_measure(self, *given):
        if len(measured) == 1:
            measured.append("signal")
            signal.raise_signal(signal.SIGTERM)
        measured.append(self.entry.label)
        return measure(self, *given)

    monkeypatch.setattr(Cell, "measure", signalled_measure)
    line = signalled(capfd, ["eval", "--config", "eval.yaml", "--fresh", "--output", "out"])
    assert goes_on(line) == ["eval", "--config", "eval.yaml", "--output", "out"]  # without --fresh: cells are kept
    assert main(goes_on(line)) == 0
    assert measured == ["full", "signal", "rtn"]
    assert Path("out/results.json").exists()


def process(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", HERE.format(code), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("command", "signals", "ends"),
    [
        ("slow", [signal.SIGTERM], (143, "calib: interrupted by SIGTERM; start again with: calib bench --turns 3\n")),
        ("slow", [signal.SIGINT], (130, "calib: interrupted by SIGINT; start again with: calib bench --turns 3\n")),
        ("stubborn", [signal.SIGTERM, signal.SIGINT], (130, "calib: ended by a second SIGINT\n")),
        ("stubborn", [signal.SIGTERM], (143, "calib: interrupted by SIGTERM; the work in progress did not stop in time\n")),
        ("batch", [signal.SIGINT], (130, "calib: interrupted by SIGINT; start again with: calib bench --turns 3\n")),
        ("swallowing", [signal.SIGTERM], (143, "calib: interrupted by SIGTERM; start again with: calib bench --turns 3\n")),
        ("dropping", [signal.SIGTERM], (143, "calib: interrupted by SIGTERM; start again with: calib bench --turns 3\n")),
        ("leaving", [signal.SIGTERM], (143, "calib: interrupted by SIGTERM; start again with: calib bench --turns 3\n")),
    ],
    ids=lambda part: part if isinstance(part, str) else None,
)  # fmt: skip
def test_however_the_command_takes_it(command, signals, ends):
    """Also in a batch that takes too long, and in code that swallows the exception, drops it in a destructor, or exits itself."""
    code = f"""
from calib import interrupts; interrupts.GRACE = {2 if len(signals) == 1 else 30}
import importlib, time
def slow(*_):
    print('running', flush=True)
    time.sleep(60)
    return 0
def stubborn(*_):
    while True:
        try: slow()
        except BaseException: print('once', flush=True)
def batch(*_):
    with interrupts.held(): slow()
def swallowing(*_):
    try: slow()
    except BaseException: return 0
def dropping(*_):
    class Dropping:
        def __del__(self): slow()
    Dropping()
    return slow()
def leaving(*_):
    try: slow()
    except BaseException: sys.exit(0)
importlib.import_module = lambda name: type('Command', (), {{'run': {command}}})
"""
    running = process(code, "bench", "--turns", "3")
    for number in signals:
        assert running.stdout.readline() == "running\n"
        running.send_signal(number)
        if len(signals) > 1:
            assert number != signals[0] or running.stdout.readline() == "once\n"
    _, error = running.communicate(timeout=20)
    assert (running.returncode, error) == ends


# The import of torch sends a signal to the process.
SIGNAL_AT_IMPORT = """
import os
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), {})
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("number", list(STATUS))
def test_a_signal_while_modules_are_imported(number):
    running = process(SIGNAL_AT_IMPORT.format(int(number)), "tune", "--help")
    _, error = running.communicate(timeout=20)
    assert running.returncode == STATUS[number]
    assert error == f"calib: interrupted by {number.name}; start again with: calib tune --help\n"


@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_signal_before_and_behind_the_command_itself(monkeypatch, capsys, number, when):
    """While the log's lines are set up or taken down."""

    @contextmanager
    def shown():
        if when == "before":
            os.kill(os.getpid(), number)
        yield
        os.kill(os.getpid(), number)

    monkeypatch.setattr(log_lines, "shown", shown)
    monkeypatch.setattr(cli, "command", lambda name: lambda words: 0)
    assert main(["methods"]) == STATUS[number]
    assert capsys.readouterr().err == f"calib: interrupted by {number.name}; start again with: calib methods\n"


def test_what_was_ignored_stays_ignored(monkeypatch):
    """As under `nohup`, and for commands in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.listening():
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pending() is None


def test_a_checkpoint_leaves_nothing_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """Lightning's own checkpoint writer writes there first, and a killed process leaves the file there."""
    (tmp_path / "temporary").mkdir()
    seen = []

    def looking(*given):
        seen.extend(file.name for file in Path(tmp_path, "temporary").iterdir())
        return replace(*given)

    replace = os.replace
    monkeypatch.setattr(os, "replace", looking)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    AtomicCheckpointIO().save_checkpoint({"x": torch.ones(3)}, tmp_path / "x.ckpt")
    assert seen == []
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["x"].tolist() == [1, 1, 1]


def test_a_long_command_is_not_repeated():
    assert cli.going_on("bench", ["x" * 4000]) == "start again with: the same command"
    assert cli.going_on("bench", ["a\nb"]) == "start again with: the same command"
