"""What is refused is said in an engine's log, once for each reason: stores ask for thousands of chunks."""

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
        """Warns of `error`, unless one like it was told before."""
        with self._lock:
            if str(error) in self._told:
                return
            self._told.add(str(error))
        self._logger.warning("%s: %s", self._what, error)
