"""The logger "calib", to which library code reports progress; commands print its messages as lines on stderr.

A script that uses the library configures logging itself: without a handler, only warnings and errors are shown.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("calib")
CELLS = logging.getLogger("calib.cells")  # a line for each finished cell; not shown on a terminal, where a bar shows it


class Lines(logging.Handler):
    """Writes each message to stderr at once, as `calib: MESSAGE`."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != CELLS.name or not sys.stderr.isatty():
            print(f"calib: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def shown() -> Iterator[None]:
    """Context in which messages from level INFO are printed to stderr, and not passed on to handlers of the root logger."""
    before, lines = (LOG.level, LOG.propagate), Lines()
    LOG.addHandler(lines)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(lines)
        LOG.setLevel(before[0])
        LOG.propagate = before[1]
