"""Calibrated transform coding: bits are distributed over a model's cache by their effect on the model's answers."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar
from weakref import WeakSet

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import ROLES, Allocation, Allocator
from calib.runtime.artifact.components import (
    ROPE,
    Coding,
    LayerCodes,
    allocator,
    coding_of,
    error_at,
    layer_codes,
    positions_measured,
    prediction,
)
from calib.runtime.artifact.transform_tensors import PREDICTED, SIZED
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import MOST, check_whole
from calib.runtime.methods.contract import Geometry, Method, check_choice, check_flag
from calib.runtime.paging.page_numbers import PageNumbers
from calib.runtime.paging.pages import GROWTH, TIER_PAGE_TOKENS
from calib.runtime.paging.window import STEP
from calib.runtime.stages.codec import Codec, MixedQuant
from calib.runtime.stages.saliency import Normalised, Probes
from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.stages.tiering.shares import MOST_BLOCK
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

BITS = 2.0  # the default budget
WINDOW, BLOCK = 64, 16  # tokens, without tiers
TIERS_BLOCK = 100  # as in `zipcache`
MOST_BYTES = 2**50  # the largest budget
EXACT_BYTES = 2  # of a value in the exact window, where a budget is in bytes
PAGE_NUMBER_BYTES = 4  # int32; the device may hold two copies, one of them with room for more pages

_told: "WeakSet[Artifact]" = WeakSet()  # artifacts for which a missing stream was reported


@dataclass(frozen=True)
class Klt(Method):
    """Karhunen-Loeve transform, reverse water-filling, and nothing stored beside the codes but a size of four bits.

    1. Attention over a prompt is exact. The first `sinks` tokens stay exact, and the newest `window`.
    2. A key or value x of a head becomes y = E (x - mean): components of the calibrated basis, in units of their ranges. The basis
       diagonalises the covariance under the error measure e^T W e; W is the measured sensitivity of the model's answers.
    3. Component j has b_j bits, 0 ... 8, by reverse water-filling over the whole model
       (`runtime/artifact/component_bits.py`), for one of three budgets. Another budget needs no other fit.
    4. Cost of an encoded value: the budget, which includes the sizes of step 6. No zero points or indices are stored.
    5. Attention works on codes, and applies the basis of values to its output once a step. Components of keys before RoPE do not
       depend on positions: tiles of keys are decoded and rotated. With components after RoPE the basis is folded into the query.
    6. With `size` each token's components are divided by its own size first (`stages/codec/sized.py`); with `predict` a value is
       coded as its difference from a prediction by the key's codes, and attention sums key codes too (`stages/prediction.py`).
    7. With `trellis` a component has twice as many levels for its bits; the bits of earlier components tell which half it may use
       (`stages/codec/trellis.py`).

    Needs an artifact: `calib fit` measures the bases, steps and errors.

    Args:
        bits: the budget in bits per value of an encoded token, keys and values together; without another budget 2.
        loss: instead, the divergence from the full cache's predictions that is allowed, in nats a token (measured in the fit).
        bytes: instead, what the cache of `batch` rows of `context` tokens may take in all, tables and exact tokens included.
        context: tokens of a row, with `bytes`.
        batch: rows, with `bytes`.
        sinks: first tokens of a row that stay exact.
        window: newest tokens that are exact; None is 64, with `tiers` none.
        block: tokens encoded together, so that up to as many more are exact; None is 16, with `tiers` 100.
        rope: components of keys "before" RoPE, or "after" it: then decode steps are faster, and errors larger on texts and
            positions that the fit did not measure. None is "before" if the artifact has such components, else "after", as where
            the model's RoPE cannot be undone.
        size: whether every token has a size of four bits in each stream and head, by which its components are divided before they
            are coded, so that steps fit the token. Only with keys before RoPE. None: yes if the artifact has the tensors for it and
            predicts less error with it at this budget; no with `loss`, which the fit measured without sizes.
        predict: whether values are predicted from the codes of their keys, so that only the difference is coded; needs `size`.
            None: yes if tokens have sizes and the artifact has the tensors for it.
        trellis: whether levels are trellis-coded: narrower steps at the same bits, and a search for the codes. None: yes if values
            are predicted from keys.
        tiers: (bits, share) of each tier, best first, by saliency as in `zipcache`; instead of a budget. Shares sum to 1. With keys
            before RoPE every token's position is stored as well, 32 bits for each head.
        probes: with `tiers`, rows whose attention scores tokens, as in `zipcache`: "random+recent", "random", "recent" or "all".
        probe_share: share of rows that are probes.
    """

    name: ClassVar[str] = "klt"
    packs: ClassVar[tuple[type[Codec], ...]] = (MixedQuant,)
    needs_fit: ClassVar[bool] = True

    bits: float | None = None
    loss: float | None = None
    bytes: int | None = None
    context: int | None = None
    batch: int = 1
    sinks: int = 4
    window: int | None = None
    block: int | None = None
    rope: str | None = None
    size: bool | None = None
    predict: bool | None = None
    trellis: bool | None = None
    tiers: Sequence[tuple[float, float]] | None = None
    probes: str = "random+recent"
    probe_share: float = 0.1

    def __post_init__(self) -> None:
        budgets = {"bits": self.bits, "loss": self.loss, "bytes": self.bytes, "tiers": self.tiers}
        asked = [name for name, value in budgets.items() if value is not None]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)} are both budgets; give one of them")
        for name, budget in (("bits", self.bits), ("loss", self.loss)):
            if budget is not None and (type(budget) not in (float, int) or not 0 < budget < math.inf):
                raise ValueError(f"{name} must be a number above 0, got {printable(budget)}")
        for name, least in (("bytes", 1), ("context", 1), ("batch", 1), ("sinks", 0), ("window", 0), ("block", 1)):
            number = getattr(self, name)
            if number is not None:
                most = {"bytes": MOST_BYTES, "block": MOST_BLOCK}.get(name, MOST)
                check_whole(name, number, least, f"a whole number from {least}", most=most)
        if (self.bytes is None) != (self.context is None):
            raise ValueError(
                f"bytes={self.bytes} and context={self.context}: a budget in bytes is for a context of so "
                "many tokens; give both or neither"
            )
        if self.tiers is not None and self.window:
            raise ValueError(
                f"window={self.window} with tiers: a tier's tokens are exact until their block is full; leave it out"
            )
        if self.rope is not None:
            check_choice("rope", self.rope, ROPE)
        for name in ("size", "predict", "trellis"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.predict and self.size is False:
            raise ValueError(
                "predict=True with size=False: the fit measured predicted values only with sizes; leave size out"
            )
        wanted = next((name for name in ("size", "predict") if getattr(self, name)), None)
        if wanted and self.rope == "after":
            raise ValueError(
                f"{wanted}=True with rope='after': the fit measures sizes only for keys before RoPE; leave rope out"
            )
        check_choice("probes", self.probes, ("random+recent", "random", "recent", "all"))
        self._bits_and_shares()
        self._tiering()
        self._probes()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """The tiers of one layer."""
        if artifact is None:
            raise ValueError(
                "method 'klt' needs calibrated bases: pass artifact=Artifact.load(...), or --artifact FILE, from `calib fit`"
            )
        coding = self.coding(artifact)
        tiers = tuple(
            self.tier(layer, allocation, artifact, coding) for allocation in self.allocations(artifact, coding)
        )
        before = coding.rope == "before"
        plan = TieredPlan(
            tiers, self._tiering(), before_rope=before, measured=None if before else positions_measured(artifact)
        )
        return plan if len(tiers) == 1 else replace(plan, saliency=Normalised(), probes=self._probes())

    def allocations(self, artifact: Artifact, coding: Coding | None = None) -> list[Allocation]:
        """Returns how each tier's bits are distributed over the model; raises ValueError for a budget that cannot be met."""
        coding = self.coding(artifact) if coding is None else coding
        found = allocator(artifact, coding)
        if self.loss is not None:
            return [found.at_error(error_at(artifact, self.loss, coding))]
        if self.bytes is not None:
            return [self._within_bytes(found, coding)]
        return [found.at_bits(bits) for bits, _ in self._bits_and_shares()]

    def bytes_of(
        self, allocation: Allocation, coding: Coding, layers: int, heads: int, channels: int, growing: bool = False
    ) -> int:
        """Returns the bytes of a cache of `batch` rows of `context` tokens in a 16-bit model: packed pages, exact tokens and
        tables; with `growing` also, at most, the pages that are allocated ahead while rows grow token by token, and the pages'
        numbers on the device."""
        assert self.context is not None
        tiering = self._tiering()
        exact = min(-(-self.context // STEP) * STEP, self.sinks + tiering.window + tiering.block)
        longest = -(-max(0, self.context - self.sinks - tiering.window) // TIER_PAGE_TOKENS)  # pages of a row
        pages, numbers = self.batch * longest, 0
        if growing:
            pages += pages // GROWTH
            numbers = PAGE_NUMBER_BYTES * self.batch * (longest + PageNumbers(TIER_PAGE_TOKENS).with_room(longest))
        width, tables = 0, 0  # bytes of a token's codes and sizes in all layers
        for both in zip(*(allocation.streams[role] for role in ROLES), strict=True):
            keys, values = (len(own.widths) * max(own.counts) for own in both)
            width += 2 * (sum(sum(own.counts) for own in both) + coding.size_bytes(heads))
            tables += 2 * (4 + 12 * channels) + (4 * channels + 8) * (keys + values)
            if coding.size:
                tables += 4 * (keys + values)  # weights of the components in a token's size
            if coding.trellis:
                tables += 4 * (keys + values)  # weights of the components' errors along a path
            if coding.predict:
                tables += 2 * keys * channels + 4 * channels
        window = self.batch * exact * layers * heads * 2 * channels * EXACT_BYTES
        turns = 4 * channels if coding.rope == "before" else 0  # RoPE's frequencies, at most; all heads share them
        return window + pages * TIER_PAGE_TOKENS * width + numbers + heads * tables + turns

    def _within_bytes(self, found: Allocator, coding: Coding) -> Allocation:
        assert self.bytes is not None
        shape = (coding, found.layers, found.heads, found.channels, True)
        low, high = found.least_bits, 8.0
        least = self.bytes_of(found.at_bits(low), *shape)
        if least > self.bytes:
            raise ValueError(
                f"bytes={self.bytes} is less than {self.batch} x {self.context} tokens take at {low:.3g} bits, {least}; "
                "allow more, or a smaller window"
            )
        if self.bytes_of(found.at_bits(high), *shape) <= self.bytes:
            return found.at_bits(high)
        while high - low > found.least_bits / found.layers / 2:
            middle = (low + high) / 2
            fits = self.bytes_of(found.at_bits(middle), *shape) <= self.bytes
            low, high = (middle, high) if fits else (low, middle)
        return found.at_bits(low)

    def coding(self, artifact: Artifact, whole_words: bool = False) -> Coding:
        """Returns how this artifact's components are coded: by the options given, and for those left at None with the least
        predicted error; `whole_words` as in `Coding`."""
        rope = coding_of(artifact, self.rope).rope
        if rope == "after" and (self.size or self.predict):
            raise ValueError(
                f"{'size' if self.size else 'predict'}=True: the artifact has no statistics of keys before RoPE, which this needs; "
                "leave it out"
            )
        predict = artifact.has(f"{PREDICTED}.errors") if self.predict is None else self.predict
        plain = Coding(rope, trellis=bool(self.trellis))
        sized = Coding(rope, True, predict, predict if self.trellis is None else self.trellis, whole_words)
        if self.size or self.predict:
            return sized
        known = rope == "before" and all(artifact.has(f"{stem}.errors") for stem in SIZED.values())
        if self.size is False or self.loss is not None or not known:
            return plain
        wanted = (*SIZED, PREDICTED) if self.predict is None else SIZED
        missing = next((stream for stream in wanted if not artifact.has(f"{stream}.errors")), None)
        if missing is not None:
            _warn_without(artifact, missing)
        if missing in SIZED:
            return plain
        return min(plain, sized, key=lambda coding: self._error(artifact, coding))

    def _error(self, artifact: Artifact, coding: Coding) -> float:
        """Predicted error of a token, averaged over the tiers by share; infinite if the budget cannot be met."""
        try:
            tiers = self.allocations(artifact, coding)
        except ValueError:
            return math.inf
        return sum(tier.error * share for tier, (_, share) in zip(tiers, self._bits_and_shares(), strict=True))

    def tier(self, layer: int, allocation: Allocation, artifact: Artifact, coding: Coding) -> TierPlan:
        """Returns the transforms and codecs of one layer's keys and values, with the bit widths of one of the `allocations`."""

        def stages(codes: LayerCodes) -> TierStages:
            return TierStages(codes.basis, codes.codec)

        keys, values = (layer_codes(artifact, role, layer, allocation.streams[role][layer], coding) for role in ROLES)
        predicted = prediction(artifact, layer, keys) if coding.predict else None
        return TierPlan(stages(keys), stages(values), prediction=predicted)

    def _bits_and_shares(self) -> list[tuple[float, float]]:
        if self.tiers is None:
            return [(BITS if self.bits is None else self.bits, 1.0)]
        tiers = self.tiers
        if (
            not isinstance(tiers, Sequence)
            or not tiers
            or any(not isinstance(t, Sequence) or len(t) != 2 for t in tiers)
        ):
            raise ValueError(f"tiers must be pairs (bits, share), best first, got {printable(tiers)}")
        for bits, _ in tiers:
            if type(bits) not in (float, int) or not 0 < bits <= 8:
                raise ValueError(f"tiers: bits must be a number above 0, at most 8, got {printable(bits)}")
        if any(one[0] <= other[0] for one, other in pairwise(tiers)):
            raise ValueError(
                f"each of tiers must have fewer bits than the one before, got {[t[0] for t in tiers]}; put the most precise first"
            )
        return [(bits, share) for bits, share in tiers]

    def _tiering(self) -> RatioTiers:
        shares = tuple(share for _, share in self._bits_and_shares())
        window, block = (WINDOW, BLOCK) if self.tiers is None else (0, TIERS_BLOCK)
        window = window if self.window is None else self.window
        return RatioTiers(shares, block if self.block is None else self.block, window=window, sinks=self.sinks)

    def _probes(self) -> Probes:
        return Probes(self.probes, self.probe_share)


def _warn_without(artifact: Artifact, stream: str) -> None:
    """Warns, once for each artifact, that it lacks the tensors of `stream`: it is older than these, or was exported without."""
    if artifact not in _told:
        _told.add(artifact)
        predicted = stream == PREDICTED
        does, remedy = (
            ("predicts no values", "predict=False") if predicted else ("codes components without sizes", "size=False")
        )
        warnings.warn(
            f"the artifact has no tensors '{stream}.*', so klt {does} and loses more at the same bits; "
            f"run `calib fit` again, export these tensors too, or give {remedy}",
            stacklevel=2,
        )
