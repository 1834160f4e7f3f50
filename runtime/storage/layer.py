"""One layer of a chunk in the profile "heads": tokens are encoded into words and decoded with the stages of `klt`.

Keys are given and returned before RoPE. Tokens are coded independently: a token's words, and what is decoded from them, have the
same bits in any chunk. Words are those of `klt`'s caches, to the bit (`Basis.forward` is exact). Decoding is exact as well, unlike
attention, where the rounding of products depends on their shapes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.paging.field import Block
from calib.runtime.stages.codec import Sized
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.to_device import to_device
from calib.runtime.stages.transform import Basis
from calib.runtime.storage.heads import codes_of
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

ORDER = ("words", "sizes")  # the order of a stream's fields


@dataclass(frozen=True)
class LayerCoder:
    """Coder of one layer, for the KV heads of a chunk.

    Args:
        plan: the plan of `klt` for these heads (`heads.py`).
    """

    plan: TierPlan

    def widths(self) -> dict[str, int]:
        """Number of 16-bit words of a token in each field, "keys.words" and so on, in the order of a chunk's bytes."""
        found = dict[str, int]()
        for role, stages in self.plan.streams():
            # Heads without words are decoded to their mean, and need no sizes.
            if any(codes_of(stages).counts):
                fields = stages.codec.fields(0, torch.float32)
                found |= {f"{role}.{name}": fields[name].width for name in ORDER if name in fields}
        return found

    def to(self, device: torch.device) -> "LayerCoder":
        """The same with its tables on `device`."""
        return LayerCoder(to_device(self.plan, device))

    def encode(self, keys: Tensor, values: Tensor, before: Tensor | None = None) -> tuple[Block, None]:
        """Encodes unrotated keys and values, `[kv_heads, tokens, D]`, float, into fields int16 `[tokens, width]`. `before` is not
        used and None returned for the next layer: only `joint_layer.py` predicts from the layer before."""
        found: dict[str, Tensor] = {}
        block = self._encoded("keys", self.plan.keys, keys[None], found)
        if block is not None and self.plan.prediction is not None:
            assert isinstance(self.plan.keys.codec, Sized)
            values = values.float() - self.plan.prediction.values(self.plan.keys.codec, block)[0]
        self._encoded("values", self.plan.values, values[None], found)
        return found, None

    def decode(self, block: Block, tokens: int, before: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
        """Decodes the fields of `encode` into unrotated keys and values, float32 `[kv_heads, tokens, D]`."""
        keys, values = (self._decoded(stages, named(block, role), tokens) for role, stages in self.plan.streams())
        own = named(block, "keys")
        if own and self.plan.prediction is not None:
            assert isinstance(self.plan.keys.codec, Sized)
            values = values + self.plan.prediction.values(self.plan.keys.codec, own)[0]
        return keys, values, None

    @staticmethod
    def _encoded(role: str, stages: TierStages, x: Tensor, found: dict[str, Tensor]) -> Block | None:
        """The block of a stream, None if no head has a word; its fields are added to `found`."""
        if not any(codes_of(stages).counts):
            return None
        assert isinstance(stages.transform, Basis)
        block = encoded(stages.transform, stages.codec, x, False)
        found |= {f"{role}.{name}": field[0, 0] for name, field in block.items()}
        return block

    @staticmethod
    def _decoded(stages: TierStages, block: Block, tokens: int) -> Tensor:
        assert isinstance(stages.transform, Basis)
        if not block:
            return stages.transform.mean.expand(-1, tokens, -1)
        tile = {name: field.mT for name, field in block.items()}
        codec = stages.codec
        sizes = codec.sizes(tile).mT if isinstance(codec, Sized) else None
        return stages.transform.inverse_of_codes(codes_of(stages).codes(tile).mT, sizes)[0]


def named(block: Block, role: str) -> Block:
    """The fields `[1, 1, tokens, width]` of the stream `role`, without the stream in their names."""
    return {
        name.removeprefix(f"{role}."): field[None, None] for name, field in block.items() if name.startswith(f"{role}.")
    }
