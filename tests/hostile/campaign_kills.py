"""Kills `calib fit` at random moments and resumes it: in the end the artifact must have the bytes of an undisturbed fit.

    python tests/hostile/campaign_kills.py --cases 50 --seed 0 --json kills.json

Each case has its own folder. `calib fit` runs there and gets SIGKILL, SIGTERM or SIGINT after a random part of the time that an
undisturbed fit takes, up to three times; it is then resumed with `--ckpt_path last`, and the last attempt is left alone. Some
attempts are new interpreters, so that signals arrive during imports, too; the others are forked from a process that has imported
everything. Checked are exit statuses (143, 130), one line without a traceback, the end in time, the artifact's bytes, and that no
temporary file is left, neither beside the results nor in TMPDIR.
"""

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE = 200  # seconds after which a process, signalled or not, counts as hanging
LOOK = 150  # seconds after which a process prints its traceback
KILLS = 3  # most kills of a case
FRESH = 0.2  # share of the attempts that start a new interpreter
TRACES = ("Traceback", "Exception ignored", "Fatal Python error")
OPTIONS = [
    "--model.bits=[2]", "--model.clip_factors=[1,0.8]", "--model.query_rows=2", "--model.clip_sequences=6",
    "--model.residual_forms={keys: ['*x1'], values: []}", "--model.residual_bits=[2]", "--model.sensitivity_sequences=4",
    "--data.length=64", "--data.sequences=12", "--data.heldout_sequences=4", "--data.batch_size=1",
    "--model.checkpoint_batches=3", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    "--trainer.logger=false", "--model.dictionary.atoms=8", "--model.dictionary.samples=300",
    "--model.dictionary.heldout_samples=100", "--model.dictionary.keys_sparsity=3",
    "--model.dictionary.values_sparsity=2", "--model.dictionary.epochs=4",
]  # fmt: skip
INTERPRETER = (
    f"import faulthandler; faulthandler.dump_traceback_later({LOOK}); "
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore SIGINT
    "from calib.cli import main; print('begun', flush=True); sys.exit(main(sys.argv[1:]))"
)


@dataclass
class Counts:
    """Counts of the campaign, and a description of each failure."""

    cases: int = 0
    kills: int = 0
    resumed_to_same_bytes: int = 0
    wrong_status: int = 0
    tracebacks: int = 0
    wrong_lines: int = 0
    hangs: int = 0
    left_files: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether every case ended with the same bytes, and nothing else was wrong."""
        return self.resumed_to_same_bytes == self.cases and not self.failures


def forked(words: Sequence[str], folder: Path) -> None:
    """Run `calib fit` in a forked process that has imported it already."""
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.dump_traceback_later(LOOK)
    from calib.cli import main

    print("begun", flush=True)
    sys.exit(main(list(words)))


class Attempt:
    """One process of a case."""

    def __init__(self, words: Sequence[str], folder: Path, fresh: bool) -> None:
        self.folder, self.fresh = folder, fresh
        for name in ("stdout", "stderr"):
            (folder / name).write_text("")
        if fresh:
            with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as error:
                command = [sys.executable, "-c", INTERPRETER, *words]
                environment = os.environ | {"TMPDIR": str(folder / "tmp")}
                self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=error, env=environment)
            self.number = self.process.pid
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["calib.fit.command"])
            self.child = context.Process(target=forked, args=(list(words), folder))
            self.child.start()
            assert self.child.pid is not None
            self.number = self.child.pid

    def begun(self) -> None:
        """Wait until the process prints "begun": before that, a signal would reach only Python's own start."""
        deadline = time.monotonic() + PATIENCE
        while "begun" not in (self.folder / "stdout").read_text() and time.monotonic() < deadline:
            time.sleep(0.005)

    def end(self, seconds: float) -> int | None:
        """Wait for the exit status, negative for a signal; None if the process still runs after `seconds`."""
        if not self.fresh:
            self.child.join(seconds)
            return self.child.exitcode
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, number: int) -> None:
        """Send a signal, if the process still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, number)

    def errors(self) -> str:
        """The text on standard error so far."""
        return (self.folder / "stderr").read_text(errors="replace")


def words(toy: Path, resumed: bool) -> list[str]:
    """Arguments of `calib fit` for the toy model and text in the folder `toy`."""
    files = [f"--model.path={toy / 'llama'}", f"--data.text={toy / 'text.txt'}", "--output=toy.safetensors"]
    return ["fit", *files, *OPTIONS, *(["--ckpt_path=last"] if resumed else [])]


def judge(counts: Counts, case: str, sent: int, status: int | None, errors: str, done: bool = False) -> None:
    """Count what is wrong with the end of a process that got the signal `sent` (0: none); `done`: the artifact exists.

    An interpreter with torch takes a second to end after calib's last line. A signal in that second ends the process without a
    line of calib's; a shell sees the same status, 130 or 143, and nothing is left to resume.
    """
    ended = 0 if sent == 0 else -sent if sent == signal.SIGKILL or (done and status == -sent) else 128 + sent
    if status is None:
        counts.hangs += 1
        counts.failures.append(f"{case}: hangs after {sent}: {errors[-3000:]}")
    elif status != ended and not (status == 0 and done):
        counts.wrong_status += 1
        counts.failures.append(f"{case}: status {status} after {sent}: {errors[-300:]}")
    if any(trace in errors for trace in TRACES):
        counts.tracebacks += 1
        counts.failures.append(f"{case}: after {sent}: {errors[-2000:]}")
    lines = [line for line in errors.splitlines() if line.startswith("calib: ")]
    name = signal.Signals(sent).name if sent else ""
    wanted = status == 128 + sent and sent != 0
    if len(lines) != wanted or (wanted and not (f" by {name}; " in lines[0] and " --ckpt_path" in lines[0])):
        counts.wrong_lines += 1
        counts.failures.append(f"{case}: after {sent}: {lines}")


def case(
    number: int, rng: random.Random, toy: Path, folder: Path, expected: bytes, takes: float, counts: Counts
) -> float:
    """Run one case: kill, resume, compare. Returns the seconds that a fit takes now, since the load of a machine changes."""
    counts.cases += 1
    folder.mkdir()
    (folder / "tmp").mkdir()
    artifact = folder / "toy.safetensors"
    kills, status = rng.randint(1, KILLS), None
    for attempt in range(kills + 1):
        fresh, sent = rng.random() < FRESH, int(rng.choice(SIGNALS)) if attempt < kills else 0
        label = f"case {number}, attempt {attempt + 1} ({'fresh' if fresh else 'forked'})"
        delay = rng.random() * takes * (2 if fresh else 1)  # imports take as long as the rest
        running = Attempt(words(toy, attempt > 0), folder, fresh)
        running.begun()
        begin = time.monotonic()
        status = running.end(delay if sent else PATIENCE)
        if status == 0 and attempt == 0 and not fresh:  # the fit ended before the signal
            takes = time.monotonic() - begin
        if sent and status is None:
            counts.kills += 1
            running.kill(sent)
            status = running.end(PATIENCE)
        if status is None:
            running.kill(signal.SIGKILL)
            running.end(PATIENCE)
            judge(counts, label, sent, None, running.errors())
            return takes
        judge(counts, label, sent, status, running.errors(), artifact.exists())
        if status == 0:
            break
    if status == 0 and artifact.exists() and artifact.read_bytes() == expected:
        counts.resumed_to_same_bytes += 1
    else:
        counts.failures.append(f"case {number}: other bytes, or none")
    left = [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", ".partial"))]
    left += [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(("pymp-", "torchinductor"))]
    if left:
        counts.left_files += 1
        counts.failures.append(f"case {number}: left {left}")
    return takes


def campaign(cases: int, seed: int, room: Path, first: int = 0) -> Counts:
    """Run the cases in folders below `room`."""
    from toy_language_model import save_text, save_toy

    save_toy(room / "llama")
    save_text(room / "text.txt")
    for name in ("warm", "straight"):  # the first fit includes the imports, so the second one is timed
        (room / name / "tmp").mkdir(parents=True)
        running = Attempt(words(room, resumed=False), room / name, fresh=False)
        running.begun()
        begin = time.monotonic()
        status = running.end(PATIENCE)
        takes = time.monotonic() - begin
        if status != 0:
            raise SystemExit(f"the undisturbed fit ended with status {status}: {running.errors()[-1000:]}")
    expected = (room / "straight/toy.safetensors").read_bytes()
    counts = Counts()
    for number in range(first, first + cases):
        folder = room / f"case{number}"
        before = len(counts.failures)
        takes = case(number, random.Random(f"{seed}/{number}"), room, folder, expected, takes, counts)
        print(*counts.failures[before:], sep="\n", end="", file=sys.stderr)
        shutil.rmtree(folder)
        print(f"{counts.cases}/{cases}: {counts.kills} kills, {len(counts.failures)} failures", file=sys.stderr)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign from the command line; print the counts, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to have a failed one again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts and the failures")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as room:
        counts = campaign(asked.cases, asked.seed, Path(room), asked.first)
    text = json.dumps({"seed": asked.seed, **asdict(counts)}, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n", encoding="utf-8")
    return 0 if counts.clean else 1


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "support")]
    sys.exit(main())
