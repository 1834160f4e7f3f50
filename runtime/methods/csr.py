"""CSR (Zhang et al., 2024, arXiv:2412.11741): keys and values as a few atoms of a dictionary, one bit a channel."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import MOST, check_whole
from calib.runtime.methods.contract import Geometry, Method, check_choice
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.paper_counting import CountedCache, csr_bits
from calib.runtime.methods.per_stream import PerStream, Streams, of_streams
from calib.runtime.stages.codec import Codec, Sparse
from calib.runtime.stages.codec.coefficients import Coefficients
from calib.runtime.stages.codec.sparse import Index
from calib.runtime.stages.saliency import Normalised, Probes
from calib.runtime.stages.shared_table import SharedTable
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.tiering.shares import MOST_BLOCK
from calib.runtime.stages.transform import Identity
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

CHUNKS = {"keys": 1, "values": 2}  # s_n, where neither an option nor an artifact determines it
CHUNKS_OPTION = {"keys": "key_chunks", "values": "value_chunks"}
ONLINE_PER_HEAD = 256  # atoms, where there is no artifact


@dataclass(frozen=True)
class Csr(Method):
    """CSR-s: x^ = sum of s coefficients times atoms (eq. 12), found by matching pursuit (eq. 2-4).

    1. Attention over a prompt is exact. Keys are unrotated (RoPE is undone); a value is cut into `value_chunks` chunks of channels,
       a key into `key_chunks`.
    2. Dictionary of a layer: offline atoms, trained by `calib fit` and shared by a group of layers and all heads; and `online`
       ones, vectors that each row samples from its prompt: the share `reverse_share` of them are the vectors that the offline atoms
       represent worst, the others are drawn uniformly.
    3. Each key and each value becomes `sparsity` pairs of an index and a coefficient, divided equally among its chunks.
       32 s / head_dim bits a value as the paper stores them ("int16", "fp16").
    4. The newest `window` tokens stay exact; older ones are encoded `block` at a time, and never encoded again.
    5. Attention sums a token's atoms, rotates keys to their positions, and attends.

    Args:
        sparsity: s, of both streams or {keys: ..., values: ...}; a multiple of the chunks. 16, 8, 6 and 4 in the paper; None is
            8, with `tiers` none.
        online: atoms sampled from each row's prompt; None is 0 with an artifact, and 256 a KV head without one. "offline" is as
            many as the artifact has, the paper's choice. Each takes 16 bits a channel; for a prompt of T tokens they add
            16 online / (chunks kv_heads T) bits a key or value element.
        reverse_share: share of the online atoms that are the worst represented vectors; rounded down. The paper does not give it.
        window: newest tokens that are exact; None is 64, with `tiers` none.
        block: tokens encoded together; None is 16, with `tiers` 100.
        coefficients: format of a coefficient: "fp16"; "fp8" (e4m3, at most 448); or a whole number of bits 2 ... 8 with a scale for
            each token and head.
        index: "packed", the least number of bits for the dictionary's size, or "int16".
        pursuit: "matching", or "orthogonal", which refits coefficients at every step: the same storage, a lower error.
        key_chunks: s_n of the keys; None is the artifact's, and 1 without one. 2 and 4 in the paper's table 4.
        value_chunks: s_n of the values; None is the artifact's, and 2 without one.
        tiers: (s, share) of each tier, best first, by saliency as in `zipcache`; instead of `sparsity`, s in the same form. Shares
            sum to 1.
        probes: with `tiers`, rows whose attention scores tokens, as in `zipcache`: "random+recent", "random", "recent" or "all".
        probe_share: share of rows that are probes.
    """

    name: ClassVar[str] = "csr"
    packs: ClassVar[tuple[type[Codec], ...]] = (Sparse,)
    before_rope: ClassVar[bool] = True

    grid: ClassVar[Grid] = Grid({"sparsity": (2, 4, 6, 8, 12, 16), "coefficients": (4, 5, 6, 8, "fp16")})

    sparsity: int | Streams[int] | None = None
    online: int | Literal["offline"] | None = None
    reverse_share: float = 0.5
    window: int | None = None
    block: int | None = None
    coefficients: str | int = "fp16"
    index: Index = "packed"
    pursuit: str = "matching"
    key_chunks: int | None = None
    value_chunks: int | None = None
    tiers: Sequence[tuple[int | Streams[int], float]] | None = None
    probes: str = "random+recent"
    probe_share: float = 0.1

    def __post_init__(self) -> None:
        check_choice("index", self.index, ("packed", "int16"))
        check_choice("pursuit", self.pursuit, ("matching", "orthogonal"))
        if self.online != "offline":
            self._check_number("online", "a whole number from 0 or 'offline'", 0)
        self._check_number("window", "a whole number from 0", 0)
        self._check_number("block", "a whole number from 1", 1, MOST_BLOCK)
        for role, option in CHUNKS_OPTION.items():
            if (chunks := getattr(self, option)) is not None:
                check_whole(option, chunks, 1, "a whole number from 1", f"; {CHUNKS[role]} is usual")
        if type(self.reverse_share) not in (float, int) or not 0 <= self.reverse_share <= 1:
            raise ValueError(
                f"reverse_share must be a number from 0 (all uniformly) to 1, got {printable(self.reverse_share)}; 0.5 is usual"
            )
        if self.tiers is not None and self.window:
            raise ValueError(
                f"window={self.window} with tiers: a tier's tokens are exact until their block is full; leave it out"
            )
        if self.tiers is not None and self.sparsity is not None:
            raise ValueError(f"sparsity={self.sparsity} with tiers, which have their own; leave it out")
        check_choice("probes", self.probes, ("random+recent", "random", "recent", "all"))
        Coefficients(self.coefficients)
        self._pairs_and_shares()
        self._tiering()
        self._probes()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """The tiers of one layer."""
        if artifact is None and self.online in (0, "offline"):
            raise ValueError(
                f"method 'csr' without an artifact has the online dictionary alone, got online={self.online!r}; pass "
                "artifact=Artifact.load(...), or --artifact FILE, from `calib fit`, or online=256"
            )

        def stages(role: str, pairs: int) -> TierStages:
            return TierStages(Identity(), self._codec(role, pairs, layer, geometry, artifact))

        tiers = tuple(
            TierPlan(stages("keys", pairs.keys), stages("values", pairs.values))
            for pairs in self._pairs_and_shares()[0]
        )
        if len(tiers) == 1:
            return TieredPlan(tiers, self._tiering(), before_rope=True)
        return TieredPlan(tiers, self._tiering(), Normalised(), self._probes(), before_rope=True)

    def _codec(self, role: str, pairs: int, layer: int, geometry: Geometry, artifact: Artifact | None) -> Sparse:
        offline = None if artifact is None else _dictionary(artifact, role, layer)
        chunks, head_dim, option = self._chunks(role, geometry, offline), geometry.head_dim, CHUNKS_OPTION[role]
        if head_dim % chunks:
            raise ValueError(f"{option}={chunks} does not divide {head_dim} channels; use a divisor")
        if pairs % chunks:
            raise ValueError(
                f"sparsity={pairs} pairs cannot be divided evenly among {chunks} chunks of a {role.removesuffix('s')}; "
                f"use a multiple of {chunks}"
            )
        if offline is not None and head_dim // chunks != offline.tensor.shape[1]:
            raise ValueError(
                f"{option}={chunks}: vectors have {head_dim // chunks} channels, and atoms of the artifact's dictionary "
                f"{offline.tensor.shape[1]} channels; leave {option} out, or fit again"
            )
        return Sparse(
            pairs // chunks,
            chunks,
            offline,
            self._online(geometry, offline),
            Coefficients(self.coefficients),
            self.index,
            orthogonal=self.pursuit == "orthogonal",
            reverse=self.reverse_share,
        )

    def _online(self, geometry: Geometry, offline: SharedTable | None) -> int:
        """M, the number of online atoms of a stream."""
        if offline is None:
            assert self.online != "offline"  # `plan` has refused it
            return ONLINE_PER_HEAD * geometry.kv_heads if self.online is None else self.online
        return len(offline.tensor) if self.online == "offline" else self.online or 0

    def _chunks(self, role: str, geometry: Geometry, offline: SharedTable | None) -> int:
        """s_n of a stream: the option, else what the width of the artifact's atoms implies, else the default in `CHUNKS`."""
        fitted = CHUNKS[role] if offline is None else max(1, geometry.head_dim // offline.tensor.shape[1])
        return getattr(self, CHUNKS_OPTION[role]) or fitted

    def _pairs_and_shares(self) -> tuple[list[PerStream[int]], list[float]]:
        tiers = [(8 if self.sparsity is None else self.sparsity, 1.0)] if self.tiers is None else self.tiers
        if (
            not isinstance(tiers, Sequence)
            or not tiers
            or any(not isinstance(t, Sequence) or len(t) != 2 for t in tiers)
        ):
            raise ValueError(f"tiers must be pairs (sparsity, share), best first, got {printable(self.tiers)}")
        name, given = "sparsity" if self.tiers is None else "tiers: sparsity", [tier[0] for tier in tiers]

        def check(name: str, number: Any) -> None:
            check_whole(name, number, 1, "a whole number from 1", "; 8 is usual")

        pairs = [of_streams(name, sparsity, check) for sparsity in given]
        for more, fewer in pairwise(pairs):
            if more == fewer or more.keys < fewer.keys or more.values < fewer.values:
                raise ValueError(
                    f"each of tiers must have fewer pairs than the one before, got {given}; put the most precise first"
                )
        return pairs, [tier[1] for tier in tiers]

    def _check_number(self, name: str, wanted: str, least: int, most: int = MOST) -> None:
        if (number := getattr(self, name)) is not None:
            check_whole(name, number, least, wanted, most=most)

    def _tiering(self) -> RatioTiers:
        shares = tuple(self._pairs_and_shares()[1])
        if self.tiers is not None:
            return RatioTiers(shares, 100 if self.block is None else self.block)
        return RatioTiers(
            shares, 16 if self.block is None else self.block, window=64 if self.window is None else self.window
        )

    def _probes(self) -> Probes:
        return Probes(self.probes, self.probe_share)

    def paper_bits(self, cache: CountedCache) -> float | None:
        """Bits per value by the paper's formula, which is for coefficients in 16 bits; None for other formats."""
        tiers = [(sum(pairs) / 2, share) for pairs, share in zip(*self._pairs_and_shares(), strict=True)]
        return csr_bits(tiers, cache.head_dim) if self.coefficients == "fp16" else None


# One table for all layers of a group and all caches of an artifact, so that the atoms are in memory once.
_tables: "WeakKeyDictionary[Artifact, WeakValueDictionary[tuple[str, int], SharedTable]]" = WeakKeyDictionary()


def _dictionary(artifact: Artifact, stream: str, layer: int) -> SharedTable:
    """The offline atoms of a layer's group, float16 `[N, d]`."""
    atoms = artifact.tensor(f"{stream}.dictionary", wanted_by="csr")
    group = int(artifact.tensor(f"{stream}.layer_groups", wanted_by="csr")[layer])
    tables = _tables.setdefault(artifact, WeakValueDictionary())
    table = tables.get((stream, group))
    if table is None:
        table = tables[stream, group] = SharedTable(atoms[group].clone())
    return table
