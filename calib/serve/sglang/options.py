"""Our fields of `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.runtime.methods.klt import BITS
from calib.serve import fields


@dataclass(frozen=True)
class Options:
    """Our options in the JSON; its other fields are SGLang's. Bit budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        folder: folder in which pages are stored; it is made if missing.
        bits: the budget in bits per value, keys and values together.
        entropy: whether codes are entropy-coded, as in `Codec.from_artifact`.
        trellis: whether levels are trellis-coded, as in `Codec.from_artifact`.
        positions: length of the longest text in tokens; None: `max_position_embeddings` of the artifact's model. Used only if
            SGLang does not report the earlier pages (`hicache_storage_pass_prefix_keys`).
    """

    artifact: str
    folder: str
    bits: float = BITS
    entropy: bool = False
    trellis: bool = False
    positions: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Reads the options; raises ValueError for a field that is missing or out of range, and if `interface_v1` is not 1."""
        found = fields.read(
            cls, given, "the extra config", texts=("artifact", "folder"), wholes=("positions",), alone=False
        )
        if given.get("interface_v1") not in (1, True):
            raise ValueError(
                f"interface_v1 is {given.get('interface_v1')!r}, expected 1: without it SGLang passes bytes without a shape; add "
                '"interface_v1": 1'
            )
        return found
