"""Runs documented commands in this process: their own words, followed by options that make them toy-sized."""

import os
import re
import runpy
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from documented import Command
from documents_sandbox import SHAPE, SMALL_FIT, as_words

from calib import cli
from calib.config_files import find_config

PYTHON = re.compile(r"(\.venv[\w-]*/bin/)?python3?")
PEER = "benchmarks.peers.kvpress"
OUTPUTS = ("--output", "--out", "--html", "--write-cases", "--plan_json")
# Options that are appended to a command's own words, by kind of command; the last value of an option counts.
ADDITIONS: dict[str, dict[str, object]] = {
    "fit": SMALL_FIT,
    "merge": SMALL_FIT,
    "eval": {
        "limit": 1
    },  # also --only with three rows, if it is not given, and a --config without rows whose packages are missing
    "bench": {"contexts": 64, "batches": 1, "new_tokens": 2, "turns": 2},
    "benchmarks.embedded_model.pretrain": {
        "model.layers": SHAPE["num_hidden_layers"],
        "model.hidden": SHAPE["hidden_size"],
        "model.mlp": SHAPE["intermediate_size"],
        "model.positions": SHAPE["max_position_embeddings"],
        "data.phases": [{"share": 1, "rows": 2, "length": 96}],
        "data.validation_windows": 2,
        "data.validation_cases": 2,
        "score_cases": 2,
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 1,
        "trainer.log_every_n_steps": 1,
        "trainer.precision": "32-true",
        "trainer.logger": False,
        "trainer.enable_progress_bar": False,
        "trainer.enable_model_summary": False,
    },
    "benchmarks.embedded_model.scores": {"cases": 2},
    "tune": {"length": 192, "sequences": 2},
}
PACKAGES = {"quanto": "optimum", "hqq": "hqq", "dynamic": "transformers", "offloaded": "transformers"}  # of each peer
WITHOUT_GPU: dict[str, object] = {"device": "cpu"}  # for a command with --device cuda on a machine without a GPU
WITHOUT_GPUS: dict[str, object] = {"model.max_memory": None}  # for a fit, whose max_memory may name GPUs
WITHOUT_ACCELERATE: dict[str, object] = {"model.device_map": None}


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        words: the command that was run.
        status: its exit status.
        missing: files that its options name, or that it reported as written, and that it did not write.
    """

    words: list[str]
    status: int
    missing: list[str]


def additions(command: Command, folder: Path) -> list[str]:
    """The options to append to the command's own words."""
    kind = kind_of(command)
    found = as_words(ADDITIONS.get(kind, {}))
    if kind == "eval":
        if not command.values("--config"):
            return []  # the command compares two earlier runs
        rows = method_rows(command)
        possible = [row for row in rows if "peer" not in row or find_spec(PACKAGES[row["peer"]])]
        if possible != rows:
            found += ["--config", save_rows(possible, command.values("--config")[-1], folder)]
        found += [] if command.values("--only") else ["--only", *some(possible)]
    fits = kind in ("fit", "merge")
    if fits and not find_spec("accelerate"):
        found += as_words(WITHOUT_ACCELERATE)
    if not torch.cuda.is_available():
        found += as_words(WITHOUT_GPUS) if fits else []
        found += as_words(WITHOUT_GPU) if "cuda" in command.values("--device") else []
    return found


def kind_of(command: Command) -> str:
    """The subcommand of `calib`, the module of `python -m`, or the program of any other command."""
    program, *rest = command.words
    if program == "calib":
        return rest[0]
    return rest[1] if PYTHON.fullmatch(program) and rest[:1] == ["-m"] else program


def method_rows(command: Command) -> list[dict[str, Any]]:
    """`methods` of the command's last configuration that has them; configurations are found from the working folder."""
    rows: list[dict[str, Any]] = []
    for name in command.values("--config"):
        rows = yaml.safe_load(find_config(name).read_text(encoding="utf-8")).get("methods", rows)
    return rows


def save_rows(rows: list[dict[str, Any]], config: str, folder: Path) -> str:
    """Write a configuration of these rows alone and return its path; it has the file name of `config`, so results have too."""
    file = folder / "rows" / Path(config).name
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump({"methods": rows}))
    return str(file)


def some(rows: list[dict[str, Any]]) -> list[str]:
    """Names of the first, a middle and the last row. Rows of peers are left out: some compile code at their first use."""
    names = [row.get("name", row.get("method")) for row in rows if {"method", "results"} & {*row}]
    return list(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))


def answer(command: Command, folder: Path) -> None:
    """Write the cases and the results of a peer that a command reads, unless they exist."""
    if PEER in command.words:
        file, configs, wanted = folder / command.words[3], ["eval/quick.yaml"], []
    elif kind_of(command) == "eval":
        file, configs = folder / "cases.json", command.values("--config")
        wanted = [folder / row["results"] for row in method_rows(command) if "results" in row]
    else:
        return
    if not file.exists() and (PEER in command.words or wanted):
        full = save_rows([{"name": "full", "method": "full"}], configs[-1], folder)
        words = [word for name in [*configs, full] for word in ("--config", name)]
        assert cli.main(["eval", *words, *as_words(ADDITIONS["eval"]), "--write-cases", str(file)]) == 0
        if wanted:
            assert run_python(["python", "-m", PEER, str(file), "--press", "none", "--out", str(wanted[0])]) == 0
    for path in wanted:
        if not path.exists():
            shutil.copy(wanted[0], path)


def measure_before(command: Command, words: list[str]) -> None:
    """Run the command once without --reuse, if the run that it reuses does not exist."""
    for name in command.values("--reuse"):
        if not Path(name).exists():
            at, output = words.index("--reuse"), f"{name}.of"
            assert cli.main([*words[1:at], *words[at + 2 :], "--output", output]) == 0
            shutil.copy(Path(output) / "results.json", name)


def run(command: Command, folder: Path, capsys) -> Done:
    """Run the command in `folder`; its output is read from `capsys`."""
    with inside(folder, dict(command.environment)):
        answer(command, folder)
        words = [*command.words, *additions(command, folder)]
        measure_before(command, words)
        capsys.readouterr()
        start = time.time_ns() - 10**8  # file times have a coarser resolution
        status = cli.main(words[1:]) if words[0] == "calib" else run_python(words)
        printed = capsys.readouterr()
        told = [*command.values(*OUTPUTS), *said(printed.out)]
        missing = [name for name in told if newest(Path(name)) < start]
    print("ran:", shlex.join(words), printed.out, printed.err, sep="\n")
    return Done(words, status, missing)


def said(printed: str) -> Iterator[str]:
    """The files that lines such as `wrote A, B and C (of some size)` name."""
    for line in re.findall(r"^wrote (.+)$", printed, re.M):
        yield from re.split(r", | and ", re.split(r" \(|; | of ", line)[0])


def newest(path: Path) -> int:
    """When a file, or the newest file in a folder, was last written, in nanoseconds; 0 if there is none."""
    files = [path, *path.rglob("*")] if path.exists() else []
    return max((file.stat().st_mtime_ns for file in files), default=0)


def run_python(words: list[str]) -> int:
    """`python -m MODULE ...` in this process."""
    assert PYTHON.fullmatch(words[0]) and words[1] == "-m", words
    before, sys.argv = sys.argv, [words[2], *words[3:]]
    try:
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        return int(exit.code or 0)
    finally:
        sys.argv = before
    return 0


@contextmanager
def inside(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A context with `folder` as the working folder and further environment variables."""
    variables = dict(os.environ)
    os.environ.update(environment)
    try:
        with chdir(folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
