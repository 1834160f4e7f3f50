"""C of ours, compiled for this machine at its first use and kept: what plain torch says in many passes over memory.

The library lies in `$XDG_CACHE_HOME/calib/compiled` (`~/.cache`), under a name made of its source, the headers beside it, the
compiler and the processor: another machine that shares the folder has its own. `$CC`, `cc`, `gcc` or `clang` compiles it; where
there is none, or it fails, there is no library, and plain torch serves, which is said. OpenMP's functions are those that torch has
loaded, so threads are shared."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

OPTIONS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-march=native")
SECONDS = 120  # that a compiler gets

logger = logging.getLogger(__name__)


@cache
def library(source: Path, more: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The functions of a C file, compiled with `more` options, or None where this machine does not compile it."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        texts = [part.read_text() for part in (source, *sorted(source.parent.glob("*.h")))]
        said = hashlib.sha256("\0".join([*texts, compiler, *OPTIONS, *more, _processor()]).encode())
        kept = _folder() / f"{source.stem}-{said.hexdigest()[:16]}.so"
        if not kept.exists():
            _compile([compiler, *OPTIONS, *more], source, kept)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home, no room, no OpenMP ...
        why = " ".join(str(error).split())
        logger.warning(
            f"{source.name} is not compiled ({why}); plain torch serves, which is slower; give a C compiler as $CC"
        )
        return None


@cache
def library_of_rows(source: Path, rows: int) -> ctypes.CDLL | None:
    """The same of a C file in which the number of query rows of a KV head is a constant. A model has one number or two; a library
    for all of them took minutes to compile."""
    return library(source, (f"-DROWS={rows}",))


@cache
def _compiler() -> str | None:
    named = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    found = next(filter(None, map(shutil.which, named)), None)
    if found is None:
        logger.info("no C compiler is found (cc, gcc, clang or $CC); plain torch serves, which is slower")
    return found


def _folder() -> Path:
    """Ours alone: a library that another user could write would run as us."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calib" / "compiled"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and (found.stat().st_uid != os.getuid() or found.stat().st_mode & 0o022):
        raise PermissionError(f"{found} can be written by others")
    return found


def _compile(compiler: list[str], source: Path, kept: Path) -> None:
    """Under another name first: processes that start together find a whole library or none."""
    for left in kept.parent.glob("tmp*.so"):  # of processes that were killed; a live one has replaced its own by then
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 5 * SECONDS:
                left.unlink()
    logger.info("%s is compiled for this processor, which takes seconds, once; %s keeps it", source.name, kept.parent)
    handle, part = tempfile.mkstemp(suffix=".so", dir=kept.parent)
    os.close(handle)
    try:
        _run([*compiler, str(source), "-o", part])
        os.replace(part, kept)
    finally:
        Path(part).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """In a group of its own, which ends as a whole: a compiler that is late is a driver, whose children would go on."""
    none = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True) as running:
        try:
            code = running.wait(SECONDS)
        except BaseException as error:
            os.killpg(running.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                error.cmd = command[0]  # a message is one short line
            raise
    if code:
        raise subprocess.CalledProcessError(code, command[0])


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine() + platform.processor() + flags
