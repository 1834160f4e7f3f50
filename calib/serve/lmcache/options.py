"""The fields of `"serde": {"type": "calib", ...}` in an adapter's JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.runtime.methods.klt import BITS
from calib.serve import fields


@dataclass(frozen=True)
class Options:
    """What an adapter's JSON says. Budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        model: the model's name as the engine gives it to LMCache, for vLLM that of `vllm serve NAME`. Chunks of other models are
            refused: their shapes may be the same, and LMCache knows them by the name alone.
        bits: the budget in bits per value, keys and values together.
        trellis: whether levels are trellis-coded, as `Codec.from_artifact` takes it.
        positions: of the longest text, in tokens; None: `max_position_embeddings` of the artifact's model. LMCache tells no
            position, so the start of a chunk is looked for among the multiples of its length below.
        cpu_block: tokens of a block of vLLM's CPU attention (`layout.py`), 128 there; None: an engine on a GPU.
        max_workers: threads that encode and decode.
    """

    artifact: str
    model: str
    bits: float = BITS
    trellis: bool = False
    positions: int | None = None
    cpu_block: int | None = None
    max_workers: int = 1

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Raises ValueError for a field that is unknown, missing or out of its range."""
        return fields.read(
            cls, given, "serde calib", texts=("artifact", "model"), wholes=("positions", "cpu_block", "max_workers")
        )
