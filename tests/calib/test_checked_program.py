"""`ends_well` runs a program in a process of its own: which programs end well, which limits stop others, and what one can see."""

import os
import time
from pathlib import Path

import pytest

from calib.evaluate.checked_program import ends_well


@pytest.mark.parametrize(
    ("program", "well"),
    [
        ("assert 1 + 1 == 2", True),
        ("print('a' * 100_000)", True),
        ("assert 1 + 1 == 3", False),
        ("def f(:", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("raise SystemExit", False),
        ("import os; os.write(1, b'passed')\nos._exit(0)", False),
        ("import os; os.kill(os.getpid(), 9)", False),
        ("input()", False),
        ("def exit(): pass\nimport os; os.write = os._exit = None", True),
        ("def f(n): return f(n + 1)\nf(0)", False),
        ("\0", False),
        ("\ud800", False),
    ],
)
def test_a_program_ends_well_behind_its_last_line(program, well, capfd):
    assert ends_well(program, 5.0) is well
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\nwhile True: pass",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()\nwhile True: pass",
    ],
)
def test_an_endless_one_is_stopped(program):
    start = time.monotonic()
    assert not ends_well(program, 0.5)
    assert time.monotonic() - start < 2


def test_what_it_sees(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    seen = (
        "import os, sys\n"
        "assert set(os.environ) <= {'HOME', 'TMPDIR', 'LC_ALL', 'SYSTEMROOT'}, os.environ\n"
        "assert os.listdir() == [] and os.path.samefile(os.environ['HOME'], os.getcwd())\n"
        "assert sys.stdin.read() == '' and sys.flags.isolated and '/nowhere' not in sys.path\n"
    )
    assert ends_well(seen, 5.0)


def test_its_folder_is_removed(tmp_path):
    told = tmp_path / "told"
    program = f"import os\nopen('left', 'w').write('x')\nopen({str(told)!r}, 'w').write(os.getcwd())"
    assert ends_well(program, 5.0) and not Path(told.read_text()).exists()


@pytest.mark.parametrize("program", ["bytearray(2 << 30)", "open('large', 'wb').write(bytes(2 << 20))"])
def test_memory_and_files_are_limited(program):
    assert not ends_well(program, 5.0)


def test_a_fork_has_no_more_memory_and_does_not_outlive_it(tmp_path):
    """As root, to whom the limit on processes does not apply; other users cannot fork at all."""
    large, alive = tmp_path / "large", tmp_path / "alive"
    program = (
        "import os, time\n"
        "hungry = os.fork()\n"
        "if hungry == 0:\n"
        "    block = bytearray(2 << 30)\n"
        f"    open({str(large)!r}, 'w').write('it has it')\n"
        "    os._exit(0)\n"
        "assert os.waitpid(hungry, 0)[1] != 0\n"
        "sleeper = os.fork()\n"
        "if sleeper == 0:\n"
        "    time.sleep(60)\n"
        f"open({str(alive)!r}, 'w').write(str(sleeper))\n"
    )
    assert ends_well(program, 5.0) is alive.exists()
    assert not large.exists()
    if alive.exists():
        sleeper, until = int(alive.read_text()), time.monotonic() + 2
        while runs(sleeper) and time.monotonic() < until:
            time.sleep(0.01)
        assert not runs(sleeper)
    else:
        assert os.geteuid() != 0


def runs(process):
    """Whether there is such a process and it is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
