"""What is refused is said in an engine's log, once for each reason: stores ask for thousands of chunks."""

import re
import threading
from logging import Logger


class Refusals:
    """Reasons that were told. Threads may share it.

    Args:
        logger: of the engine.
        what: the sentence's beginning, such as "serde calib refuses a chunk".
    """

    def __init__(self, logger: Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._told = set[str]()
        self._lock = threading.Lock()

    def tell(self, error: Exception) -> None:
        """Warns of `error`, unless one that differs in numbers alone was told before."""
        reason = re.sub(r"\w*\d\w*", "0", str(error))
        with self._lock:
            if reason in self._told:
                return
            self._told.add(reason)
        self._logger.warning("%s: %s", self._what, error)
