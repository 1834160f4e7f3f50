"""The fields of `"serde": {"type": "calib", ...}` in the JSON of an LMCache adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.runtime.methods.klt import BITS
from calib.serve import fields


@dataclass(frozen=True)
class Options:
    """The serde's options in an adapter's JSON. Bit budgets are checked by `Codec`.

    Attributes:
        artifact: path of an artifact of `calib fit`.
        model: the model's name as the engine gives it to LMCache, for vLLM that of `vllm serve NAME`. Chunks of other models are
            refused: their shapes may be the same, and LMCache distinguishes models by name only.
        bits: the budget in bits per value, keys and values together.
        trellis: whether levels are trellis-coded, as in `Codec.from_artifact`.
        positions: length of the longest text in tokens; None: `max_position_embeddings` of the artifact's model. LMCache does not
            report positions, so the start of a chunk is searched among the multiples of its length below this number.
        cpu_block: tokens of a block of vLLM's CPU attention (`layout.py`), 128 in vLLM; None: an engine on a GPU.
        max_workers: number of threads that encode and decode.
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
        """Reads the options; raises ValueError for a field that is unknown, missing or out of range."""
        return fields.read(
            cls, given, "serde calib", texts=("artifact", "model"), wholes=("positions", "cpu_block", "max_workers")
        )
