"""Where a chunk begins, where an engine does not say: told from its keys, among the multiples of its length.

Engines cut texts from their first token on into chunks of one length, and store a request's in order. So 0 and the position
behind the chunk before are tried first; all other multiples only where neither fits, which takes as long as there are multiples.
Of the embedded model's and of SmolLM2's chunks of 128 and 256 tokens the right start was always the clear one; a chunk that fits
none is of another model or layout (`runtime/storage/start.py`).
"""

from torch import Tensor

from calib.runtime.storage import Codec


class Starts:
    """Finds starts below `positions`, one chunk behind another; threads may share it, what they share is a guess."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._before = 0  # start of the chunk before

    def of(self, codec: Codec, chunk: Tensor) -> int:
        """The start of `chunk`, as `Codec.encode` takes it. Raises ValueError where no multiple of its length is clearly it."""
        tokens = chunk.shape[2]
        candidates = range(0, self._positions - tokens + 1, tokens)
        near = [start for start in (0, self._before, self._before + tokens) if start in candidates]
        try:
            found = codec.start_of(chunk, near)
        except ValueError:
            found = codec.start_of(chunk, candidates)
        self._before = found
        return found
