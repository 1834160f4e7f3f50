"""Logs refused chunks in an engine's log, once for each reason, since stores handle thousands of chunks."""

import re
import threading
from logging import Logger


class Refusals:
    """Logs each reason once. Threads may share it.

    Args:
        logger: the engine's logger.
        what: beginning of the log message, such as "serde calib refuses a chunk".
    """

    def __init__(self, logger: Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._told = set[str]()
        self._lock = threading.Lock()

    def tell(self, error: Exception) -> None:
        """Logs `error` as a warning, unless one that differs only in words with digits was logged before."""
        reason = re.sub(r"\w*\d\w*", "0", str(error))
        with self._lock:
            if reason in self._told:
                return
            self._told.add(reason)
        self._logger.warning("%s: %s", self._what, error)
