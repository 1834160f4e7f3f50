"""The fields of `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.runtime.methods.klt import BITS
from calib.serve import fields

LEAST_CHUNK = 256  # tokens, where nothing is said: a chunk's header and its call are little then


@dataclass(frozen=True)
class Options:
    """What the JSON says. Budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        folder: where chunks are stored. It is made.
        bits: the budget in bits per value, keys and values together.
        entropy: whether codes go through an entropy coder, as `Codec.from_artifact` takes it.
        trellis: whether levels are trellis-coded, as `Codec.from_artifact` takes it.
        chunk: tokens of a file, a multiple of the engine's block size; None: the least one that is at least 256.
    """

    artifact: str
    folder: str
    bits: float = BITS
    entropy: bool = False
    trellis: bool = False
    chunk: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Raises ValueError for a field that is unknown, missing or out of its range."""
        return fields.read(cls, given, "kv_connector_extra_config", texts=("artifact", "folder"), wholes=("chunk",))

    def tokens(self, block: int) -> int:
        """Of a chunk, where the engine's blocks have `block` tokens. Raises ValueError where they do not divide it."""
        chunk = self.chunk or -(-LEAST_CHUNK // block) * block
        if chunk % block:
            raise ValueError(
                f"chunk is {chunk}, expected a multiple of the engine's block size {block}; give one, or leave it out"
            )
        return chunk
