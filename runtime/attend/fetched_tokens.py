"""Exact key-value pairs fetched from the host, which a layer attends instead of the packed copies in its store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from calib.kernels.probability_mass.operation import ScoredTokens, mass_by_position
from calib.runtime.attend.scored_span import ScoredSpan
from calib.runtime.logits import Logits, masked
from calib.runtime.rotation import Rotation

EMPTY = -1  # the position of an entry that holds no token


@dataclass
class FetchedTokens:
    """The fetched pairs of some rows, and a request for the attention mass of all tokens that a forward attends.

    Attributes:
        positions: int32 `[rows, kv_heads, n]`, the position of each token in its row, or EMPTY.
        keys: `[rows, kv_heads, n, Dk]`, in the model's dtype.
        values: `[rows, kv_heads, n, Dv]`.
        cos_sin: rotates queries to the position from which these keys are attended, where that is not their own.
        reach: more than the position of any attended token, and of any slot in the last page.
        asks: whether `mass` is wanted.
        mass: afterwards, float32 `[rows, kv_heads, reach]`: for each position the newest query's probability, summed over the
            query heads of a KV head; undefined at positions that were not attended.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    reach: int
    cos_sin: tuple[Tensor, Tensor] | None = None
    asks: bool = False
    mass: Tensor | None = field(default=None, init=False)

    @property
    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return self.positions.shape[2] == 0

    @cached_property
    def replaced(self) -> Tensor:
        """bool `[rows, kv_heads, reach]`: True at the positions of these tokens."""
        return marked(self.positions.long(), self.reach)

    def hides(self, positions: Tensor | slice) -> Tensor:
        """bool `[rows, kv_heads, 1, tokens]`: which of a store's tokens are hidden there, because they are attended here.

        `positions` of the store's tokens: a slice, or int64 `[rows, kv_heads or 1, tokens]` with any number >= 0 in an empty
        slot.
        """
        if isinstance(positions, slice):
            return self.replaced[..., positions][:, :, None]
        return self.replaced.gather(-1, positions.clamp(max=self.reach - 1).expand(-1, self.replaced.shape[1], -1))[
            :, :, None
        ]

    def span(self, query: Tensor, logits: Logits, back: Tensor | None) -> ScoredSpan:
        """These pairs, scored by `query [rows, kv_heads, query rows, D]` after its rotation by `cos_sin`; `back` as in `hidden`."""
        asked = query if self.cos_sin is None else Rotation.rotated(query, *self.cos_sin)
        scores = masked(logits.capped(asked @ self.keys.float().mT), self.hidden(back))
        return ScoredSpan(scores, self._mix, positions=self.positions if self.asks else None)

    def _mix(self, weights: Tensor) -> tuple[Tensor]:
        return (weights @ self.values.float(),)

    def hidden(self, back: Tensor | None) -> Tensor:
        """bool `[rows, kv_heads, n or 1, entries]`: entries without a token, or outside the queries' sliding window; the window
        begins after position `back`, int64 `[rows, 1, n, 1]`."""
        positions = self.positions[:, :, None]
        return positions == EMPTY if back is None else (positions == EMPTY) | (positions <= back)

    def take(self, spans: Sequence[ScoredSpan], normaliser: Tensor) -> None:
        """Sets `mass` from the newest query's scores in all `spans`, whose positions are known.

        `normaliser [rows, kv_heads, heads of the group, 1]` is that query's log-sum-exp over all tokens.
        """
        found = []
        for span in spans:
            assert span.positions is not None
            at = span.positions.start if isinstance(span.positions, slice) else span.positions
            found.append(ScoredTokens(newest(span.scores, normaliser.shape[2]), positions=at))
        self.mass = mass_by_position(found, normaliser, self.reach)


def newest(parts: Tensor, heads: int) -> Tensor:
    """The newest query's part of `[rows, kv_heads, heads x queries, n]`: `[rows, kv_heads, heads, n]`."""
    return parts if parts.shape[2] == heads else parts.unflatten(2, (heads, -1))[:, :, :, -1]


def marked(positions: Tensor, reach: int) -> Tensor:
    """bool `[rows, kv_heads, reach]`: True at the positions in `positions`, int64 `[rows, kv_heads, n]`."""
    found = torch.zeros(*positions.shape[:2], reach + 1, dtype=torch.bool, device=positions.device)
    return found.scatter_(-1, positions + 1, True)[..., 1:]  # EMPTY marks the column that is dropped
