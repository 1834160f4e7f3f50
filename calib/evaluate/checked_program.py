"""Programs that a model wrote: each runs in an interpreter of its own, which says whether it came to its end.

The child is a fresh interpreter (`-I`: no environment variables of Python's, no user's packages) in an empty temporary folder,
with an environment of three words, no input and no output, and ends with all its processes after `seconds`. Where the platform
has the module `resource`, memory, processor time, the size of files and new processes are limited too; the limit of processes
does not hold for root.

This keeps a mistaken program from doing harm by accident. It is no sandbox: what a program means to do, it can do with the rights
of whoever runs it, to files and over the network as well.
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
KEPT = ("SYSTEMROOT",)  # of the environment: Windows starts no interpreter without it


def ends_well(program: str, seconds: float) -> bool:
    """Whether `program` comes to its last line within `seconds` of wall time, an interpreter's start included.

    The child writes a random token when the last line is behind it, so that a program that ends itself (`sys.exit(0)`) has
    not ended well.
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
    """What the child may see of the environment."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {"HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8", **kept}


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child, and what it started and left behind in its session."""
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # of a session where all have ended, on Linux and macOS
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()
