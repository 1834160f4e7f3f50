"""What a layer attends beside the tokens of its store: exact pairs that were fetched, in place of their packed twins."""

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
    """Fetched pairs of some rows, and what is asked about the tokens that a forward attends to.

    Attributes:
        positions: int32 `[rows, kv_heads, n]`, the number of each token in its row, or EMPTY.
        keys: `[rows, kv_heads, n, Dk]`, in the model's dtype.
        values: `[rows, kv_heads, n, Dv]`.
        cos_sin: cos and sin that bring a query to where it meets these keys, where that is not its own position.
        reach: more than the position of any token attended, and of any slot in their last page.
        asks: whether `mass` is wanted.
        mass: afterwards, float32 `[rows, kv_heads, reach]`: for the token of each position its probability for the newest query,
            summed over the query heads of a KV head; anything where no token was attended.
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
        """bool `[rows, kv_heads, reach]`: the positions of these tokens."""
        return marked(self.positions.long(), self.reach)

    def hides(self, positions: Tensor | slice) -> Tensor:
        """bool `[rows, kv_heads, 1, tokens]`: which of a store's tokens are attended here instead.

        `positions` is a stretch, or int64 `[rows, kv_heads or 1, tokens]` with anything from 0 in an empty slot.
        """
        if isinstance(positions, slice):
            return self.replaced[..., positions][:, :, None]
        return self.replaced.gather(-1, positions.clamp(max=self.reach - 1).expand(-1, self.replaced.shape[1], -1))[
            :, :, None
        ]

    def span(self, query: Tensor, logits: Logits, back: Tensor | None) -> ScoredSpan:
        """These pairs, met where the `query [rows, kv_heads, query rows, D]` is rotated to; `back` as in `hidden`."""
        asked = query if self.cos_sin is None else Rotation.rotated(query, *self.cos_sin)
        scores = masked(logits.capped(asked @ self.keys.float().mT), self.hidden(back))
        return ScoredSpan(scores, self._mix, positions=self.positions if self.asks else None)

    def _mix(self, weights: Tensor) -> tuple[Tensor]:
        return (weights @ self.values.float(),)

    def hidden(self, back: Tensor | None) -> Tensor:
        """bool `[rows, kv_heads, n or 1, entries]`: entries without a token, or behind the queries' sliding window, whose newest
        position out of sight is `back` int64 `[rows, 1, n, 1]`."""
        positions = self.positions[:, :, None]
        return positions == EMPTY if back is None else (positions == EMPTY) | (positions <= back)

    def take(self, spans: Sequence[ScoredSpan], normaliser: Tensor) -> None:
        """Takes in what the newest query gave to the tokens of all `spans`, whose positions are known: `mass`.

        `normaliser [rows, kv_heads, heads of the group, 1]` is its log-sum-exp over all of them.
        """
        found = []
        for span in spans:
            assert span.positions is not None
            at = span.positions.start if isinstance(span.positions, slice) else span.positions
            found.append(ScoredTokens(newest(span.scores, normaliser.shape[2]), positions=at))
        self.mass = mass_by_position(found, normaliser, self.reach)


def newest(parts: Tensor, heads: int) -> Tensor:
    """Of `[rows, kv_heads, heads x queries, n]` the newest query's: `[rows, kv_heads, heads, n]`."""
    return parts if parts.shape[2] == heads else parts.unflatten(2, (heads, -1))[:, :, :, -1]


def marked(positions: Tensor, reach: int) -> Tensor:
    """bool `[rows, kv_heads, reach]`: the positions among `positions` int64 `[rows, kv_heads, n]`."""
    found = torch.zeros(*positions.shape[:2], reach + 1, dtype=torch.bool, device=positions.device)
    return found.scatter_(-1, positions + 1, True)[..., 1:]  # EMPTY marks the column that is dropped
