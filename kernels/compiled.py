"""Compiles the C sources of CPU kernels at first use and loads them. The C does in one pass what plain torch does in several.

The library is kept in `$XDG_CACHE_HOME/calib/compiled` (default `~/.cache`). Its file name contains a hash of the source, the
headers beside it, the compiler and the processor, so machines that share the folder do not share libraries. The compiler is `$CC`,
`cc`, `gcc` or `clang`. If there is none, or it fails, a message is logged and plain torch is used instead. OpenMP symbols resolve
to the OpenMP library that torch has loaded, so both use the same threads."""

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
SECONDS = 120  # time limit of a compiler run

logger = logging.getLogger(__name__)


@cache
def library(source: Path, more: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Compiles a C file with `more` compiler options and loads it; None if that fails. Cached."""
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
            f"{source.name} is not compiled ({why}); plain torch is used, which is slower; set $CC to a C compiler"
        )
        return None


@cache
def library_of_rows(source: Path, rows: int) -> ctypes.CDLL | None:
    """`library` of a C file in which the number of query rows of a KV head is the macro ROWS. A model uses one or two values of
    it; one library with all values took minutes to compile."""
    return library(source, (f"-DROWS={rows}",))


@cache
def _compiler() -> str | None:
    named = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    found = next(filter(None, map(shutil.which, named)), None)
    if found is None:
        logger.info("no C compiler is found (cc, gcc, clang or $CC); plain torch is used, which is slower")
    return found


def _folder() -> Path:
    """Returns the cache folder. Raises PermissionError if others can write to it: a library of theirs would run with our rights."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calib" / "compiled"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and (found.stat().st_uid != os.getuid() or found.stat().st_mode & 0o022):
        raise PermissionError(f"{found} can be written by others")
    return found


def _compile(compiler: list[str], source: Path, kept: Path) -> None:
    """Compiles `source` to the file `kept`, under a temporary name first: other processes see a complete library or none."""
    for left in kept.parent.glob("tmp*.so"):  # of killed processes: a running one has renamed its file within this time
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 5 * SECONDS:
                left.unlink()
    logger.info(
        "%s is compiled for this processor, once, in some seconds; the library is kept in %s", source.name, kept.parent
    )
    handle, part = tempfile.mkstemp(suffix=".so", dir=kept.parent)
    os.close(handle)
    try:
        _run([*compiler, str(source), "-o", part])
        os.replace(part, kept)
    finally:
        Path(part).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """Runs the compiler in its own process group. On a timeout the whole group is killed: a compiler is a driver whose child
    processes would otherwise continue."""
    none = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True) as running:
        try:
            code = running.wait(SECONDS)
        except BaseException as error:
            os.killpg(running.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                error.cmd = command[0]  # keeps the message short
            raise
    if code:
        raise subprocess.CalledProcessError(code, command[0])


def _processor() -> str:
    """Name and instruction set flags of the processor, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine() + platform.processor() + flags
