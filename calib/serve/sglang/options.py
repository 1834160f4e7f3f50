"""The fields of `--hicache-storage-backend-extra-config` that are ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.runtime.methods.klt import BITS
from calib.serve import fields


@dataclass(frozen=True)
class Options:
    """What the JSON says; its other fields are SGLang's. Budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        folder: where pages are stored. It is made.
        bits: the budget in bits per value, keys and values together.
        entropy: whether codes go through an entropy coder, as `Codec.from_artifact` takes it.
        trellis: whether levels are trellis-coded, as `Codec.from_artifact` takes it.
        positions: of the longest text, in tokens; None: `max_position_embeddings` of the artifact's model. Read only where
            SGLang does not tell the pages before (`hicache_storage_pass_prefix_keys`).
    """

    artifact: str
    folder: str
    bits: float = BITS
    entropy: bool = False
    trellis: bool = False
    positions: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Raises ValueError for a field that is missing or out of its range, and without SGLang's interface of whole pages."""
        found = fields.read(
            cls, given, "the extra config", texts=("artifact", "folder"), wholes=("positions",), alone=False
        )
        if given.get("interface_v1") not in (1, True):
            raise ValueError(
                f"interface_v1 is {given.get('interface_v1')!r}, expected 1: without it SGLang hands over bytes of no shape; add "
                '"interface_v1": 1'
            )
        return found
