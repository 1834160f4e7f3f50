"""Calibrated transform coding: every bit of a model's cache goes where the model's answers need it most."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from calib.runtime.allocation import ROLES, Allocation, Allocator, Words
from calib.runtime.artifact import Artifact
from calib.runtime.methods.contract import Geometry, check_choice
from calib.runtime.pages import TIER_PAGE_TOKENS
from calib.runtime.stages.codec import MixedQuant
from calib.runtime.stages.saliency import Normalised, Probes
from calib.runtime.stages.tiering import Shares
from calib.runtime.stages.transform import Basis
from calib.runtime.tiered.plan import TieredPlan
from calib.runtime.tiered.tier_plan import TierPlan, TierStages

BITS = 2.0  # of a budget that nobody named
WINDOW, BLOCK = 64, 16  # tokens, without tiers
TIERS_BLOCK = 100  # as in `zipcache`
EXACT_BYTES = 2  # of a value in the exact window, where a budget is in bytes


@dataclass(frozen=True)
class Klt:
    """Karhunen-Loeve transform, reverse water-filling, and nothing stored beside the codes.

    1. Attention over a prompt is exact. The first `sinks` tokens stay exact, and the newest `window`.
    2. A key or value x of a head becomes y = E (x - mean): components of the calibrated basis, in units of their ranges. The basis
       diagonalises the covariance as errors count, e^T W e; W is the measured sensitivity of the model's answers.
    3. Component j has b_j bits, 0 ... 8, by reverse water-filling over the whole model (`runtime/allocation.py`), for one of three
       budgets. Which components have how many was never anybody's guess, and can be asked anew without fitting again.
    4. Cost of an encoded value: the budget, exactly. There is no scale, no zero point, no index.
    5. Attention folds the basis into the query once a step and into the output once a step, and reads codes in between.

    Needs an artifact: `calib fit` measures the bases, steps and errors.

    Args:
        bits: the budget in bits per value of an encoded token, keys and values together; without another budget 2.
        loss: instead, the divergence from the full cache's predictions that is allowed, in nats a token (measured in the fit).
        bytes: instead, what the cache of `batch` rows of `context` tokens may take in all, tables and exact tokens included.
        context: tokens of a row, with `bytes`.
        batch: rows, with `bytes`.
        sinks: first tokens of a row that stay exact.
        window: newest tokens that are exact; None is 64, with `tiers` none.
        block: tokens encoded together, up to so many more are exact; None is 16, with `tiers` 100.
        rope: components of keys "after" RoPE, or "before" it: then keys are decoded and turned to their places, tile by tile.
        tiers: (bits, share) of each tier, best first, by saliency as in `zipcache`; in place of a budget. Shares sum to 1.
        probes: with `tiers`, rows whose attention is looked at, as in `zipcache`: "random+recent", "random", "recent" or "all".
        probe_share: share of rows that are probes.
    """

    bits: float | None = None
    loss: float | None = None
    bytes: int | None = None
    context: int | None = None
    batch: int = 1
    sinks: int = 4
    window: int | None = None
    block: int | None = None
    rope: str = "after"
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
                raise ValueError(f"{name} must be a number above 0, got {budget!r}")
        for name, least in (("bytes", 1), ("context", 1), ("batch", 1), ("sinks", 0), ("window", 0), ("block", 1)):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < least):
                raise ValueError(f"{name} must be a whole number from {least}, got {number!r}")
        if (self.bytes is None) != (self.context is None):
            raise ValueError(
                f"bytes={self.bytes} and context={self.context}: a budget in bytes is one of so many tokens; give both or neither"
            )
        if self.tiers is not None and self.window:
            raise ValueError(
                f"window={self.window} with tiers: a tier's tokens are exact until their block is full; leave it out"
            )
        check_choice("rope", self.rope, ("after", "before"))
        check_choice("probes", self.probes, ("random+recent", "random", "recent", "all"))
        self._bits_and_shares()
        self._tiering()
        self._probes()

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> TieredPlan:
        """The tiers of one layer."""
        if artifact is None:
            raise ValueError("method 'klt' needs calibrated bases: pass artifact=Artifact.load(...) from `calib fit`")
        tiers = tuple(
            TierPlan(
                self._stages("keys", layer, allocation, artifact), self._stages("values", layer, allocation, artifact)
            )
            for allocation in self.allocations(artifact)
        )
        before = self.rope == "before"
        plan = TieredPlan(
            tiers, self._tiering(), before_rope=before, measured=None if before else places_measured(artifact)
        )
        return plan if len(tiers) == 1 else replace(plan, saliency=Normalised(), probes=self._probes())

    def allocations(self, artifact: Artifact) -> list[Allocation]:
        """How the bits of each tier are shared out over the model; raises ValueError for a budget out of reach."""
        found = allocator(artifact, self.rope)
        if self.loss is not None:
            return [found.at_error(error_at(artifact, self.loss))]
        if self.bytes is not None:
            return [self._within_bytes(found)]
        return [found.at_bits(bits) for bits, _ in self._bits_and_shares()]

    def bytes_of(self, allocation: Allocation, layers: int, heads: int, channels: int) -> int:
        """Of the cache of `batch` rows of `context` tokens in a 16-bit model: packed pages, exact tokens and tables."""
        assert self.context is not None
        tiering = self._tiering()
        exact = min(self.context, self.sinks + tiering.window + tiering.block)
        pages = -(-max(0, self.context - self.sinks - tiering.window) // TIER_PAGE_TOKENS)
        words = sum(sum(own.counts) for role in ROLES for own in allocation.streams[role])
        tables = sum(
            4 + 8 * channels + (4 * channels + 8) * len(own.widths) * max(own.counts)
            for role in ROLES
            for own in allocation.streams[role]
        )
        row = exact * layers * heads * 2 * channels * EXACT_BYTES + pages * TIER_PAGE_TOKENS * words * 2
        return self.batch * row + heads * tables

    def _within_bytes(self, found: Allocator) -> Allocation:
        assert self.bytes is not None
        shape = (found.layers, found.heads, found.channels)
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

    def _stages(self, role: str, layer: int, allocation: Allocation, artifact: Artifact) -> TierStages:
        words = allocation.streams[role][layer]
        return TierStages(basis(artifact, role, layer, words, self.rope), MixedQuant(words.widths, words.counts))

    def _bits_and_shares(self) -> list[tuple[float, float]]:
        if self.tiers is None:
            return [(BITS if self.bits is None else self.bits, 1.0)]
        tiers = self.tiers
        if (
            not isinstance(tiers, Sequence)
            or not tiers
            or any(not isinstance(t, Sequence) or len(t) != 2 for t in tiers)
        ):
            raise ValueError(f"tiers must be pairs (bits, share), best first, got {tiers!r}")
        for bits, _ in tiers:
            if type(bits) not in (float, int) or not 0 < bits <= 8:
                raise ValueError(f"tiers: bits must be a number above 0, at most 8, got {bits!r}")
        if any(one[0] <= other[0] for one, other in pairwise(tiers)):
            raise ValueError(
                f"tiers must lose bits from one to the next, got {[t[0] for t in tiers]}; put the most precise first"
            )
        return [(bits, share) for bits, share in tiers]

    def _tiering(self) -> Shares:
        shares = tuple(share for _, share in self._bits_and_shares())
        window, block = (WINDOW, BLOCK) if self.tiers is None else (0, TIERS_BLOCK)
        window = window if self.window is None else self.window
        return Shares(shares, block if self.block is None else self.block, window=window, sinks=self.sinks)

    def _probes(self) -> Probes:
        return Probes(self.probes, self.probe_share)


# Curves of a model's components, for all budgets that are asked of an artifact.
_allocators: "WeakKeyDictionary[Artifact, dict[str, Allocator]]" = WeakKeyDictionary()


def allocator(artifact: Artifact, rope: str = "after") -> Allocator:
    """Any budget's allocation, from the artifact's `errors`."""
    own = _allocators.setdefault(artifact, {})
    if rope not in own:
        own[rope] = Allocator({role: artifact.tensor(f"{_stem(role, rope)}.errors", "klt") for role in ROLES})
    return own[rope]


def places_measured(artifact: Artifact) -> int | None:
    """The places at which the corpus had keys, as the artifact says; None where it does not."""
    data = artifact.provenance.get("data")
    found = [data.get(name) for name in ("length", "positions")] if isinstance(data, Mapping) else []
    return max((number for number in found if type(number) is int), default=None)


def error_at(artifact: Artifact, loss: float) -> float:
    """The predicted error at which the fit measured this loss, between its points on a line through their logarithms."""
    errors, losses = artifact.tensor("klt.loss", "klt").double().log().T.contiguous()
    if not losses[0] <= math.log(loss) <= losses[-1]:
        low, high = losses.exp()[[0, -1]].tolist()
        raise ValueError(
            f"loss={loss:g} is outside what the fit measured, {low:.3g} ... {high:.3g} nats a token; ask for that, or bits"
        )
    return math.exp(interpolated(losses, errors, math.log(loss)))


def loss_at(artifact: Artifact, error: float) -> float:
    """What the fit makes expect of a predicted error, in nats a token; beyond its points on the line of the nearest two."""
    errors, losses = artifact.tensor("klt.loss", "klt").double().log().T.contiguous()
    return math.exp(interpolated(errors, losses, math.log(error)))


def interpolated(x: Tensor, y: Tensor, at: float) -> float:
    """y at `at`, on the lines through points whose x does not fall, at least two; of points with the same x the latter's."""
    right = int(torch.searchsorted(x, torch.tensor(at, dtype=x.dtype)).clamp(1, len(x) - 1))
    (x0, x1), (y0, y1) = x[right - 1 : right + 1].tolist(), y[right - 1 : right + 1].tolist()
    return y1 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def basis(artifact: Artifact, role: str, layer: int, words: Words, rope: str) -> Basis:
    """The components of a layer's keys or values that `words` have fields for, in their plane form."""
    stem = _stem(role, rope)
    mean, rows, steps, errors = (
        artifact.tensor(f"{stem}.{name}", "klt")[layer] for name in ("mean", "basis", "steps", "errors")
    )
    rows = rows.double()
    columns = torch.linalg.inv(rows)  # [kv_heads, D, components]
    spread = (columns.square() @ errors[..., :1].double())[..., 0].sqrt()
    heads, channels = mean.shape
    most = max(words.counts)
    into = torch.zeros(heads, channels, len(words.widths) * most, dtype=torch.float64)
    back = torch.zeros(heads, len(words.widths) * most, channels, dtype=torch.float64)
    for head, count in enumerate(words.counts):
        for plane, width in enumerate(words.widths):
            own = slice(plane * count, min((plane + 1) * count, channels))
            at = slice(plane * most, plane * most + max(0, own.stop - own.start))
            reach = steps[head, own, width - 1].double() * 2 ** (width - 1)  # a step of 2^(1 - width) is this one
            into[head, :, at] = (rows[head, own] / reach[:, None]).T
            back[head, at] = (columns[head][:, own] * reach).T
    return Basis.of(mean, into, back, spread, MixedQuant(words.widths, words.counts).step(mean.device))


def _stem(role: str, rope: str) -> str:
    return "keys.klt.before" if role == "keys" and rope == "before" else f"{role}.klt"
