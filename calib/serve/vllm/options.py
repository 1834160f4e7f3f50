"""The fields of `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.runtime.methods.klt import BITS
from calib.serve import fields

LEAST_CHUNK = 256  # least tokens of a default chunk, so that the overhead of a header and a call is small


@dataclass(frozen=True)
class Options:
    """The connector's options in the JSON. Bit budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        folder: folder in which chunks are stored; it is made if missing.
        bits: the budget in bits per value, keys and values together.
        entropy: whether codes are entropy-coded, as in `Codec.from_artifact`.
        trellis: whether levels are trellis-coded, as in `Codec.from_artifact`.
        chunk: tokens of a file, a multiple of the engine's block size; None: the smallest multiple that is at least 256.
    """

    artifact: str
    folder: str
    bits: float = BITS
    entropy: bool = False
    trellis: bool = False
    chunk: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Reads the options; raises ValueError for a field that is unknown, missing or out of range."""
        return fields.read(cls, given, "kv_connector_extra_config", texts=("artifact", "folder"), wholes=("chunk",))

    def tokens(self, block: int) -> int:
        """Returns the tokens of a chunk for blocks of `block` tokens. Raises ValueError if `chunk` is not a multiple of `block`."""
        chunk = self.chunk or -(-LEAST_CHUNK // block) * block
        if chunk % block:
            raise ValueError(
                f"chunk is {chunk}, expected a multiple of the engine's block size {block}; give one, or leave it out"
            )
        return chunk
