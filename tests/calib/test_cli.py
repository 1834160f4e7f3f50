"""The dispatcher: quick help, and one line with the right exit status for whatever goes wrong."""

import os
import subprocess
import sys
import time

import pytest

from calib import __version__, cli
from calib.errors import RunError, UsageError


def test_help_answers_at_once():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from calib.cli import main; sys.exit(main(['--help']))"],
            capture_output=True,
            text=True,
            check=True,
        )
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5, times
    for name, purpose in cli.COMMANDS.items():
        assert name in done.stdout and purpose in done.stdout


def test_help_loads_no_torch():
    code = "import sys; from calib.cli import main; main(['--help']); main(['x']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"calib {__version__}\n"


def test_the_package_is_a_command():
    done = subprocess.run([sys.executable, "-m", "calib", "fitt"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("calib: error: unknown command 'fitt'")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fitt"], "unknown command 'fitt' (did you mean 'fit'?)"),
        (["GENERATE"], "unknown command 'GENERATE'"),
        (["zzz"], "unknown command 'zzz' (one of fit, merge, inspect"),
        (["--bits", "2"], "unknown command '--bits'"),
    ],
)
def test_an_unknown_command(words, text, capsys):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("calib: error: ") and text in error and error.count("\n") == 1


def test_no_command_shows_the_usage(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: calib")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UsageError("unknown key 'x'"), 2, "calib: error: unknown key 'x'\n"),
        (RunError("NaN in layer 3"), 1, "calib: error: NaN in layer 3\n"),
        (ValueError("two\n  lines"), 1, "calib: error: two lines\n"),
        (KeyError("k"), 1, "calib: error: KeyError: 'k' (--debug shows the traceback)\n"),
        (KeyboardInterrupt(), 130, "calib: interrupted by SIGINT; start again with: calib methods\n"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_every_failure_is_one_line(error, status, text, capsys, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    assert cli.main(["methods"]) == status
    assert capsys.readouterr().err == text


def test_debug_shows_the_traceback(monkeypatch):
    def fail(name):
        raise RunError("NaN in layer 3")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with pytest.raises(RunError, match="NaN in layer 3"):
        cli.main(["--debug", "methods"])


def test_the_installed_command_answers():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from calib.cli import main; sys.exit(main(['methods', '--nonsense']))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("calib: error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["methods"]])
def test_a_reader_that_leaves_early_is_no_error(words):
    """As in `calib methods | head -1`: no traceback, and the status that a shell gives to a closed pipe."""
    read, write = os.pipe()
    os.close(read)
    code = f"import sys; from calib.cli import main; sys.exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_librarys_broken_connection_is_an_error(monkeypatch, capsys):
    def fail(name):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    assert cli.main(["methods"]) == 1
    assert "Broken pipe" in capsys.readouterr().err
