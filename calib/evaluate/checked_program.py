"""Runs programs that a model wrote, each in a separate interpreter, and reports whether the program reached its end.

The child is a fresh interpreter (`-I`: Python's environment variables and the user's packages are ignored) in an empty temporary
folder, with three environment variables (on Windows a fourth), no input and no output. It is killed with all its processes after
`seconds`. If the platform has the module `resource`, memory, processor time, the size of files and new processes are limited too;
the limit of processes does not hold for root.

This keeps a faulty program from doing harm by accident. It is no sandbox: a malicious program can do everything that the user who
runs it may do, to files and over the network as well.
"""

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = Path(__file__).with_name("checked_program_child.py")
MEMORY = 2**30  # bytes of addresses; an interpreter takes less than a tenth of them
FILE = 2**20  # bytes of a file
KEPT = ("SYSTEMROOT",)  # environment variables that the child inherits: Windows needs this one to start an interpreter


def ends_well(program: str, seconds: float) -> bool:
    """Whether `program` runs to its end without an error within `seconds` of wall time, the interpreter's start included.

    The child writes a random token after the program's last line, so that a program that exits early (`sys.exit(0)`) does not
    count as having reached its end.
    """
    token = secrets.token_hex(16)
    limits = {"AS": MEMORY, "FSIZE": FILE, "CPU": math.ceil(seconds) + 1, "NPROC": 0, "CORE": 0}
    asked = json.dumps({"program": program, "token": token, "limits": limits})
    with (
        tempfile.TemporaryDirectory(prefix="calib-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as report,
    ):
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment(folder),
            start_new_session=True,
        )
        try:
            child.communicate(asked.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            end(child)
        report.seek(0)
        return child.returncode == 0 and report.read() == token.encode()


def environment(folder: str) -> dict[str, str]:
    """Returns the environment variables of the child."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {"HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8", **kept}


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes of its session."""
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # raised on Linux and macOS if all processes have ended
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()
