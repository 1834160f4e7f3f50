"""Waits for the build of quanto's C++ extension, and detects a stale build lock.

quanto compiles its C++ at the first use. A process that dies during the build leaves a lock, and later processes would wait for
it forever. The lock is a file that `torch.utils.cpp_extension.load` makes in the extension's folder and removes after the build.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

LOG = logging.getLogger(__name__)
LOCK = "lock"
LIMIT = 300.0  # seconds after which a lock is stale; a build takes about one minute
PAUSE = 1.0  # seconds between two checks


def build_folders() -> list[Path]:
    """Returns the folders in which quanto builds its extensions; empty if it is not installed."""
    try:
        from optimum.quanto.library.extensions import get_extension, is_extension_available
    except ImportError:
        return []
    names = [name for name in ("quanto_cpp", "quanto_cuda") if is_extension_available(name)]
    return [Path(get_extension(name).build_directory) for name in names]


def wait_for_builds(folders: Iterable[Path], limit: float = LIMIT) -> None:
    """Waits while another process builds, with a log message; raises ValueError for a lock older than `limit` seconds."""
    for folder in folders:
        lock, told = folder / LOCK, False
        while (age := age_of(lock)) is not None:
            if age > limit:
                raise ValueError(
                    f"quanto's C++ is locked by a build that began {age:,.0f} s ago, more than {limit:,.0f} s are not waited "
                    f"for: its process has probably died; if no other builds it now, delete the file {lock}"
                )
            if not told:
                LOG.info("waiting for another process that builds quanto's C++ (%s)", lock)
                told = True
            time.sleep(min(PAUSE, max(limit - age, 0.0) + 0.01))


def age_of(lock: Path) -> float | None:
    """Returns the seconds since the lock was made; None if there is no lock."""
    try:
        return time.time() - lock.stat().st_mtime
    except OSError:
        return None
