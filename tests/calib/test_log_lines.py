"""The log of a long run: a line for each finished cell if there is no progress bar; and no endless wait for a dead process."""

import ast
import logging
import os
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import yaml
from documented import ROOT
from toy_language_model import save_toy

from calib import cli
from calib.evaluate.entries import quanto_build
from calib.evaluate.entries.quanto_build import build_folders, wait_for_builds
from calib.evaluate.table import with_measures
from calib.log_lines import LOG, shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


def asked(folder, tmp_path):
    content = {
        "model": folder,
        "methods": [{"name": "full", "method": "full"}, {"name": "low", "method": "rtn", "bits": 2}],
        "tasks": [{"task": "retrieval", "lines": [3, 4], "cases": 2}],
    }
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(content))
    return ["eval", "--config", str(config), "--output", str(tmp_path / "out")]


def lines_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("calib: ") and " of " in line]


def test_an_evaluation_writes_a_line_for_each_cell_into_a_log(folder, tmp_path, capsys):
    assert cli.main(asked(folder, tmp_path)) == 0
    lines = lines_of(capsys)
    assert [line.split(": ")[1:3] for line in lines] == [
        ["1 of 4 cells", "full, 3 lines"],
        ["2 of 4 cells", "full, 4 lines"],
        ["3 of 4 cells", "low, 3 lines"],
        ["4 of 4 cells", "low, 4 lines"],
    ]
    figures = r": \d\.\d{3} exact answers, -\d+\.\d{3} log p, \d+\.\d\d\*? bits, \d+\.\d s$"
    assert all(re.search(figures, line) for line in lines)


@pytest.mark.parametrize(
    ("measures", "brief", "told"),
    [
        (
            "token agreement, KL, attention error",
            "0.953 0.0412 0.118",
            "0.953 token agreement, 0.0412 KL, 0.118 attention error",
        ),
        ("dB above the bound", "5.41", "5.41 dB above the bound"),
        ("dB above the bound", "20.0% kept", "20.0% kept"),
        ("dB above the bound", "exact", "exact"),
        ("bits per byte", "1.0e-05", "1.0e-05 bits per byte"),
        ("accuracy, brier score", "0.500", "0.500"),  # lm-eval gave one metric of two: which is not known
    ],
)
def test_figures_of_a_line_have_their_measures(measures, brief, told):
    column = SimpleNamespace(measure_name=measures, brief=lambda figures: brief)
    assert with_measures(column, {}) == told


def test_on_a_terminal_the_bar_is_enough(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(asked(folder, tmp_path)) == 0
    assert lines_of(capsys) == []


@pytest.mark.full
def test_a_bench_writes_a_line_for_each_cell_into_a_log(folder, tmp_path, capsys):
    words = ["--contexts", "20", "30", "--new_tokens", "2", "--turns", "2", "--output", str(tmp_path / "out")]
    assert cli.main(["bench", "--model", folder, "--methods", "rtn", *words]) == 0
    lines = lines_of(capsys)
    assert [line.split(": ")[1:3] for line in lines] == [
        ["1 of 2 cells", "1 x 20 tokens"],
        ["2 of 2 cells", "1 x 30 tokens"],
    ]
    assert all(line.count(" tokens/s") == 3 and "rtn " in line and "DynamicCache again " in line for line in lines)


@pytest.mark.full
def test_a_bench_writes_a_line_for_each_largest_batch_into_a_log(folder, tmp_path, capsys):
    words = [
        "--contexts",
        "20",
        "--new_tokens",
        "2",
        "--turns",
        "2",
        "--memory",
        "1GiB",
        "--output",
        str(tmp_path / "out"),
    ]
    assert cli.main(["bench", "--model", folder, "--methods", "rtn", *words]) == 0
    found = [line.split(": ") for line in lines_of(capsys)[1:]]
    assert [line[1:3] for line in found] == [
        ["1 of 2 largest batches", "DynamicCache, 20 tokens"],
        ["2 of 2 largest batches", "rtn, 20 tokens"],
    ]
    assert all(int(line[3]) > 1 for line in found)


def test_a_lock_that_is_too_old_is_refused_with_its_name(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 4000,) * 2)
    with pytest.raises(ValueError, match=r"its process has probably died.* delete the file .*/lock$") as caught:
        wait_for_builds([tmp_path / "nowhere", tmp_path])
    assert "\n" not in str(caught.value)


def test_a_lock_that_goes_away_is_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quanto_build, "PAUSE", 0.02)
    lock = tmp_path / "lock"
    lock.touch()
    threading.Timer(0.2, lock.unlink).start()
    with shown():
        wait_for_builds([tmp_path], limit=60)
    assert not lock.exists()
    assert capsys.readouterr().err == f"calib: waiting for another process that builds quanto's C++ ({lock})\n"


def test_messages_go_to_a_scripts_own_handlers_and_nowhere_else(caplog, capsys):
    """A command shows them once and leaves the logger as it was."""
    before = (LOG.level, LOG.propagate, [*LOG.handlers])
    with shown():
        logging.getLogger("calib.any.module").info("heard %s", "once")
        logging.getLogger("calib.any.module").debug("not heard")
    assert capsys.readouterr().err == "calib: heard once\n" and not caplog.records
    assert (LOG.level, LOG.propagate, LOG.handlers) == before
    with caplog.at_level(logging.INFO, "calib"):
        logging.getLogger("calib.any.module").info("a script's")
    assert caplog.messages == ["a script's"] and capsys.readouterr().err == ""


# Modules that are a command, or the part of one that shows its result.
SPEAKING = (
    "calib/cli.py",
    "calib/commands/*.py",
    "calib/**/command.py",
    "calib/plan/run_command.py",
    "calib/artifact_view/terminal.py",
    "calib/log_lines.py",
)
SPEAKING += (
    "calib/evaluate/table.py",
    "calib/fit/processes.py",
)  # the table of `calib eval`; the last line of a lost process
MODULES = ("kernels/ahead_of_time.py",)  # `python -m`


@pytest.mark.full
def test_library_code_does_not_print():
    printing = {
        str(path.relative_to(ROOT))
        for folder in ("calib", "runtime", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    allowed = {str(path.relative_to(ROOT)) for pattern in SPEAKING for path in ROOT.glob(pattern)}
    assert printing <= allowed | {*MODULES} and {*MODULES} <= printing


def test_a_row_of_quanto_is_refused_before_anything_runs(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    (found,) = [path for path in build_folders() if path.parent.name == "cpp"]
    assert found.name == "build"
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (0, 0))
    monkeypatch.setattr("calib.evaluate.entries.peer.build_folders", lambda: [tmp_path])
    words = ["--methods", "{name: theirs, peer: quanto}", "--contexts", "20", "--output", str(tmp_path / "out")]
    assert cli.main(["bench", "--model", folder, *words]) == 2
    assert "methods: 'theirs': quanto's C++ is locked" in capsys.readouterr().err
