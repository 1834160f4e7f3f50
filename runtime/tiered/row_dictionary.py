"""The online part of a dictionary: atoms that each row samples from its first chunk (CSR, "Build dictionary")."""

import torch
from torch import Tensor

from calib.kernels.upload import upload
from calib.runtime.files.state import State, StateError, tensor_like
from calib.runtime.stages.contract import Codec, SamplesAtoms
from calib.runtime.stages.seeded_rng import SeededRng
from calib.runtime.store import LayerContext
from calib.runtime.tiered.tier_plan import TierPlan

# Separates the random draws of keys and of values: a value that stands for the KV head in the hash.
DRAWN_AS = {"keys": 1, "values": 2}

# The largest norm of an atom: 1, plus the rounding of its entries to 16 bits.
LONGEST = 1.01


class RowDictionary:
    """The online atoms of one layer's keys or values, shared by all tiers: `atoms` float16 `[rows, M, D / chunks]`, 0 until
    sampled."""

    def __init__(self, codec: SamplesAtoms, like: Tensor, rng: SeededRng) -> None:
        """`like [rows, kv_heads, any, D]`: the first tokens."""
        self.codec, self.rng = codec, rng
        sizes = (like.shape[0], codec.columns, like.shape[3] // codec.chunks)
        self.atoms = torch.zeros(sizes, dtype=torch.float16, device=like.device)

    @staticmethod
    def of_streams(tier: TierPlan, keys: Tensor, values: Tensor, context: LayerContext) -> "dict[str, RowDictionary]":
        """Dictionaries by role, where the codec has online atoms. The best tier's codec samples them: tokens that it represents
        badly are represented badly by all tiers."""
        found = {}
        for (role, stages), like in zip(tier.streams(), (keys, values), strict=True):
            codec = stages.codec.sampling
            if codec is not None:
                found[role] = RowDictionary(codec, like, SeededRng(context.seed, context.layer, DRAWN_AS[role]))
        return found

    def sample(self, rows: list[int], tokens: Tensor) -> None:
        """Samples the atoms of `rows` from their tokens `[len(rows), kv_heads, n, D]`."""
        for own, row in zip(tokens.split(1), rows, strict=True):
            self.atoms[row] = self.codec.sampled(own, self.rng)

    def of(self, rows: range | list[int]) -> Tensor:
        """The atoms of some rows."""
        if len(rows) == len(self.atoms):
            return self.atoms
        if isinstance(rows, range):
            return self.atoms[rows.start : rows.stop]
        return self.atoms[upload(rows, torch.int64, self.atoms.device)]

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        self.atoms = self.atoms[sources.to(self.atoms.device)]

    def to(self, device: torch.device, codec: Codec) -> None:
        """Moves the atoms to `device`; `codec` is the plan's, already there."""
        self.atoms = self.atoms.to(device)
        self.codec = codec.sampling or self.codec

    def state(self) -> State:
        """The atoms, for a file."""
        return {"atoms": self.atoms}

    def restore(self, state: State) -> None:
        """Restores the atoms from `state`. Raises StateError for atoms longer than 1, with which pursuits of new tokens would
        diverge."""
        self.atoms = tensor_like(state, "atoms", self.atoms)
        longest = 0.0 if self.atoms.is_meta or not self.atoms.numel() else float(self.atoms.float().norm(dim=-1).max())
        if longest > LONGEST:
            raise StateError(f"'atoms' are vectors of length {longest:.4g}, expected 1 at most")

    def bytes(self) -> int:
        """Bytes of the atoms, from shapes."""
        return self.atoms.numel() * self.atoms.element_size()
