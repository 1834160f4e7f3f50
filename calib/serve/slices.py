"""The codecs of one artifact, one for each slice of KV heads, as the ranks of tensor parallelism have them."""

import threading
from collections.abc import Callable

import torch

from calib.runtime.storage import Codec


class Slices:
    """Codecs that are made at their first use; threads may share it.

    Args:
        make: makes the codec of a range of KV heads.
        kv_heads: number of KV heads of the model.
    """

    def __init__(self, make: Callable[[range], Codec], kv_heads: int) -> None:
        self._make, self._kv_heads = make, kv_heads
        self._codecs: dict[range, Codec] = {}
        self._lock = threading.Lock()

    def codec(self, heads: range) -> Codec:
        with self._lock:
            if heads not in self._codecs:
                self._codecs[heads] = self._make(heads)
            return self._codecs[heads]

    def of_rank(self, count: int, world: int, rank: int) -> range:
        """Returns the KV heads of a rank with `count` of them: a range of its own, or one head that several ranks share.

        Raises ValueError if `world` such ranks do not make up the model under tensor parallelism alone.
        """
        shared = count * world // self._kv_heads  # number of ranks with the same heads
        if (
            count * world != shared * self._kv_heads
            or not (shared == 1 or (shared > 1 and count == 1))
            or not 0 <= rank < world
        ):
            raise ValueError(
                f"rank {rank} of {world} has {count} KV heads of {self._kv_heads}, expected tensor parallelism alone; serve "
                "pipelines without calib"
            )
        first = rank // shared * count
        return range(first, first + count)

    def size(self, count: int, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the largest blob of any slice of `count` KV heads.

        Heads have different bits, and a store asks for the size before it says which heads a chunk has. Raises ValueError if
        `count` does not divide the model's KV heads.
        """
        if self._kv_heads % count:
            raise ValueError(
                f"the chunk has {count} KV heads, expected a divisor of {self._kv_heads}; give the artifact of this model"
            )
        slices = (range(first, first + count) for first in range(0, self._kv_heads, count))
        return max(self.codec(heads).size(tokens, dtype=dtype) for heads in slices)
