"""The attention mass that held and new tokens got in one forward, from which saliency is computed."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.probability_mass.operation import ScoredTokens, add_mass_by_position, probability_mass
from calib.runtime.attend.read_plan import ReadPlan
from calib.runtime.attend.scored_span import ScoredSpan


@dataclass(frozen=True)
class MassSlots:
    """Where a decode step adds mass directly: `mass [rows, kv_heads, slots]` float32. Window tokens use their own slots, from
    `first` on (before it are sinks); each row's new token uses slot `new`, int64 `[rows, 1, 1]` or one number for all."""

    mass: Tensor
    first: int
    new: Tensor | int

    def add(self, tokens: list[ScoredTokens], normaliser: Tensor) -> None:
        """Adds the probabilities of the window's tokens, if any, and of the new tokens."""
        *held, new = tokens
        placed = [ScoredTokens(new.scores, new.weights, self.new)]
        for window in held:
            weights, first = window.weights, self.first
            if weights is not None and weights.shape[2] > 1:
                weights = weights[..., first:]
            placed.insert(0, ScoredTokens(window.scores[..., first:], weights, first))
        add_mass_by_position(placed, normaliser, self.mass)


@dataclass(frozen=True)
class ChunkWeights:
    """Weights by which a probe query counts only for tokens of its own chunk; made for a part of the queries at a time.

    `chunks` int64 `[rows, window + n]` numbers each token's chunk, negative in empty slots; `probes` bool `[rows, n]` marks
    which of the n new queries are probes.
    """

    chunks: Tensor
    probes: Tensor

    def of(self, queries: range) -> Tensor:
        """1 where the query is a probe of the token's chunk, else 0: float32 `[rows, len(queries), window + n]`."""
        own = slice(queries.start, queries.stop)
        asked = self.chunks[:, -self.probes.shape[1] :][:, own, None]
        return ((asked == self.chunks[:, None]) & self.probes[:, own, None]).float()


@dataclass(frozen=True)
class Observed:
    """Which attention is observed: that on the first tier's slots (`tier`), or on the window's.

    `weights` weigh the n queries: `[rows, n, window + n]` by token, `[rows, n, 1]` for all tokens; None: 1. With `into`, a
    step's mass is added there at once and not returned.
    """

    tier: bool
    weights: Tensor | ChunkWeights | None = None
    into: MassSlots | None = None

    def weights_of(self, queries: range) -> Tensor | None:
        """The weights of the query columns `queries`."""
        if isinstance(self.weights, ChunkWeights):
            return self.weights.of(queries)
        return None if self.weights is None else self.weights[:, queries.start : queries.stop]


@dataclass(frozen=True)
class AttentionStats:
    """Attention mass (sums of probabilities) by KV head, float32: `held [rows, kv_heads, slots]` on slots of the observed tier
    or window, `new [rows, kv_heads, n]` on the new tokens."""

    held: Tensor
    new: Tensor

    @staticmethod
    def of(
        observed: Observed, spans: list[ScoredSpan], normaliser: Tensor, plan: ReadPlan, queries: range
    ) -> "AttentionStats | None":
        """From the watched `spans`, which hold the logits of `queries`, and the queries' log-sum-exp `normaliser`.

        The last span ends with the new tokens that `plan.new` reads. None where the mass was added to `observed.into`.
        """
        scores = [span.scores for span in spans if span.watched]
        last, count = scores.pop(), plan.new.stop - plan.new.start
        window = last.shape[3] - count
        scores += [last[..., :window], last[..., window:]] if window else [last]
        weights: list[Tensor | None] = [None] * len(scores)
        if (own := observed.weights_of(queries)) is not None:
            weights = [own] * len(scores)
            if own.shape[2] > 1:
                weights[-1] = own[..., plan.window :][..., plan.new]
                weights[:-1] = [own[..., : plan.window]] * (len(scores) - 1)
        tokens = [ScoredTokens(*one) for one in zip(scores, weights, strict=True)]
        if observed.into is not None:
            observed.into.add(tokens, normaliser)
            return None
        *held, new = probability_mass(tokens, normaliser)
        return AttentionStats(new[..., :0] if not held else held[0] if len(held) == 1 else torch.cat(held, -1), new)

    def plus(self, later: "AttentionStats", new: slice) -> "AttentionStats":
        """The sum with the mass from `later` queries, which saw the `new` tokens of the forward."""
        added = F.pad(self.new, (0, new.stop - self.new.shape[2]))
        added[..., new] += later.new
        return AttentionStats(self.held + later.held, added)
