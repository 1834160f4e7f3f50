"""Finds the position at which a chunk begins from its keys, for engines that do not report it.

Engines cut texts into chunks of one length, beginning at the first token, and store a request's chunks in order. So the candidates
are the multiples of the length: 0 and the positions at and after the previous chunk are tried first, all others only if none of
these fits, which takes time proportional to their number. For chunks of 128 and 256 tokens of the embedded model and of SmolLM2,
the right start was always unambiguous; a chunk that fits no start is from another model or layout (`runtime/storage/start.py`).
"""

from torch import Tensor

from calib.runtime.storage import Codec


class Starts:
    """Finds starts of successive chunks below `positions`; threads may share it, since the remembered start is only a guess."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._before = 0  # start of the previous chunk

    def of(self, codec: Codec, chunk: Tensor) -> int:
        """Returns the start of `chunk` (as for `Codec.encode`). Raises ValueError if no multiple of its length clearly fits."""
        tokens = chunk.shape[2]
        candidates = range(0, self._positions - tokens + 1, tokens)
        near = [start for start in (0, self._before, self._before + tokens) if start in candidates]
        try:
            found = codec.start_of(chunk, near)
        except ValueError:
            found = codec.start_of(chunk, candidates)
        self._before = found
        return found
