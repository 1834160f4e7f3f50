"""What saliency is told of a forward: the attention that held and new tokens got."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.probability_mass.operation import ScoredTokens, add_mass_by_position, probability_mass
from calib.runtime.attend.read_plan import ReadPlan
from calib.runtime.attend.scored_span import ScoredSpan


@dataclass(frozen=True)
class MassSlots:
    """Where a step's mass is added at once: to `mass [rows, kv_heads, slots]` float32, of the window's tokens at their slots from
    `first` on, of each row's new token at `new`: int64 `[rows, 1, 1]`, or one for all."""

    mass: Tensor
    first: int
    new: Tensor | int

    def add(self, tokens: list[ScoredTokens], normaliser: Tensor) -> None:
        """What the window, if it has any slots, and the new tokens got."""
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
    """Weight 1 of a probe row for the tokens of its own chunk, 0 of all else; made for some queries at a time.

    `chunks` int64 `[rows, window + n]` is a number of each token's chunk, negative in slots that hold none; `probes` bool
    `[rows, n]` says which of the new tokens' queries are probes.
    """

    chunks: Tensor
    probes: Tensor

    def of(self, queries: range) -> Tensor:
        """float32 `[rows, len(queries), window + n]`."""
        own = slice(queries.start, queries.stop)
        asked = self.chunks[:, -self.probes.shape[1] :][:, own, None]
        return ((asked == self.chunks[:, None]) & self.probes[:, own, None]).float()


@dataclass(frozen=True)
class Observed:
    """What is observed: the slots of the first tier, or of the window; with `weights [rows, n, window + n]`, with `weights
    [rows, n, 1]` for all tokens, or all rows alike. `into`: of a step that observes the window, where nothing of it is kept."""

    tier: bool
    weights: Tensor | ChunkWeights | None = None
    into: MassSlots | None = None

    def weights_of(self, queries: range) -> Tensor | None:
        """The weights of some of the n queries."""
        if isinstance(self.weights, ChunkWeights):
            return self.weights.of(queries)
        return None if self.weights is None else self.weights[:, queries.start : queries.stop]


@dataclass(frozen=True)
class AttentionStats:
    """Attention mass by KV head, float32: on slots of the watched tier or the window `held [rows, kv_heads, slots]`, and
    on the new tokens `new [rows, kv_heads, n]`."""

    held: Tensor
    new: Tensor

    @staticmethod
    def of(
        observed: Observed, spans: list[ScoredSpan], normaliser: Tensor, plan: ReadPlan, queries: range
    ) -> "AttentionStats | None":
        """From the watched `spans`: the logits of `queries` are there, and their log-sum-exp is known now. The last span ends with
        the new tokens, of which those that the plan reads have a column in `new`. None where the mass was added at once."""
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
        """With what later queries gave, who saw the `new` tokens of so many columns."""
        added = F.pad(self.new, (0, new.stop - self.new.shape[2]))
        added[..., new] += later.new
        return AttentionStats(self.held + later.held, added)
