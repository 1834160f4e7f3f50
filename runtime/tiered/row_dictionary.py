"""The online part of a dictionary: atoms that each row samples from its first chunk (CSR, "Build dictionary")."""

from dataclasses import replace

import torch
from torch import Tensor

from calib.runtime.draws import Draws
from calib.runtime.numbers import upload
from calib.runtime.stages.codec import Codec, Corrected, Sparse
from calib.runtime.state import State, tensor_like
from calib.runtime.store import Place
from calib.runtime.tiered.tier_plan import TierPlan

# What tells the draws of the two streams apart: the KV head of a hash that belongs to none.
DRAWN_AS = {"keys": 1, "values": 2}


class RowDictionary:
    """Online parts of one stream and layer, shared by all tiers: `atoms` float16 `[rows, M, D / chunks]`, zero until sampled."""

    def __init__(self, codec: Sparse, like: Tensor, draws: Draws) -> None:
        """`like [rows, kv_heads, any, D]`: the first tokens."""
        self.codec, self.draws = codec, draws
        sizes = (like.shape[0], codec.columns, like.shape[3] // codec.chunks)
        self.atoms = torch.zeros(sizes, dtype=torch.float16, device=like.device)

    @staticmethod
    def of_streams(tier: TierPlan, keys: Tensor, values: Tensor, place: Place) -> "dict[str, RowDictionary]":
        """By stream, where the tier's codec has an online part. The best tier's: what it represents badly is bad for all."""
        found = {}
        for (role, stages), like in zip(tier.streams(), (keys, values), strict=True):
            codec = sparse_part(stages.codec)
            if codec is not None and codec.columns:
                found[role] = RowDictionary(codec, like, Draws(place.seed, place.layer, DRAWN_AS[role]))
        return found

    def sample(self, rows: list[int], tokens: Tensor) -> None:
        """Takes the atoms of `rows` from their tokens `[len(rows), kv_heads, n, D]`."""
        for own, row in zip(tokens.split(1), rows, strict=True):
            self.atoms[row] = self.codec.sampled(own, self.draws)

    def of(self, rows: range | list[int]) -> Tensor:
        """Those of some rows."""
        if len(rows) == len(self.atoms):
            return self.atoms
        if isinstance(rows, range):
            return self.atoms[rows.start : rows.stop]
        return self.atoms[upload(rows, torch.int64, self.atoms.device)]

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.atoms = self.atoms[sources.to(self.atoms.device)]

    def to(self, device: torch.device, codec: Codec) -> None:
        """Moves the atoms; `codec` is the plan's, already there."""
        self.atoms = self.atoms.to(device)
        self.codec = sparse_part(codec) or self.codec

    def state(self) -> State:
        """The atoms."""
        return {"atoms": self.atoms}

    def restore(self, state: State) -> None:
        """See `state`."""
        self.atoms = tensor_like(state, "atoms", self.atoms)

    def bytes(self) -> int:
        """From shapes."""
        return self.atoms.numel() * self.atoms.element_size()


def sparse_part(codec: Codec) -> Sparse | None:
    """The codec, or what it corrects, where that is sparse."""
    inner = codec.codec if isinstance(codec, Corrected) else codec
    return inner if isinstance(inner, Sparse) else None


def bound(codec: Codec, online: Tensor) -> Codec:
    """A codec for rows whose online atoms are `online [rows, M, D / chunks]`."""
    if isinstance(codec, Corrected):
        return replace(codec, codec=bound(codec.codec, online))
    assert isinstance(codec, Sparse)
    return codec.bound(online)
