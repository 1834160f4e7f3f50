"""What a layer attends beside the tokens of its store: exact pairs that were fetched, in place of their packed twins."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

NOWHERE = -1  # the place of an entry that holds no token


@dataclass
class Beside:
    """Fetched pairs of some rows, and what is asked about the tokens that a forward attends to.

    Attributes:
        places: int64 `[rows, kv_heads, n]`, the number of each token in its row, or NOWHERE.
        keys: `[rows, kv_heads, n, Dk]`, in the model's dtype.
        values: `[rows, kv_heads, n, Dv]`.
        turns: cos and sin that bring a query to where it meets these keys, where that is not its own place.
        reach: more than the place of any token attended, and of any slot in their last page.
        asks: whether `mass` is wanted.
        mass: afterwards, float32 `[rows, kv_heads, reach]`: for the token of each place its probability for the newest query,
            summed over the query heads of a KV head.
    """

    places: Tensor
    keys: Tensor
    values: Tensor
    reach: int
    turns: tuple[Tensor, Tensor] | None = None
    asks: bool = False
    mass: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.twins = marked(self.places, self.reach)
        if self.asks:
            self.mass = torch.zeros(*self.places.shape[:2], self.reach, device=self.places.device)

    def hides(self, places: Tensor | slice) -> Tensor:
        """bool `[rows, kv_heads, 1, tokens]`: which of a store's tokens are attended here instead.

        `places` is a stretch, or int64 `[rows, kv_heads or 1, tokens]` with anything from 0 in an empty slot.
        """
        if isinstance(places, slice):
            return self.twins[..., places][:, :, None]
        return self.twins.gather(-1, places.clamp(max=self.reach - 1).expand(-1, self.twins.shape[1], -1))[:, :, None]

    def hidden(self, back: Tensor | None) -> Tensor:
        """bool `[rows, kv_heads, n or 1, entries]`: entries without a token, or behind the queries' sliding window, whose newest
        place out of sight is `back` int64 `[rows, 1, n, 1]`."""
        places = self.places[:, :, None]
        return places == NOWHERE if back is None else (places == NOWHERE) | (places <= back)

    def add(self, places: Tensor | slice, scores: Tensor, normaliser: Tensor) -> None:
        """Takes in what the newest query gave to the tokens of a part.

        Args:
            places: a stretch, or int64 `[rows, kv_heads, tokens]`, any where a token is hidden.
            scores: `[rows, kv_heads, heads of the group x queries, tokens]`, -inf where a token is hidden.
            normaliser: log-sum-exp of the newest query over all parts, `[rows, kv_heads, heads of the group, 1]`.
        """
        assert self.mass is not None
        given = (newest(scores, normaliser.shape[2]) - normaliser).exp_().sum(2)
        if isinstance(places, slice):
            self.mass[..., places] += given
        else:
            self.mass.scatter_add_(-1, places.clamp(0, self.reach - 1).expand_as(given), given)


def newest(parts: Tensor, heads: int) -> Tensor:
    """Of `[rows, kv_heads, heads x queries, n]` the newest query's: `[rows, kv_heads, heads, n]`."""
    return parts if parts.shape[2] == heads else parts.unflatten(2, (heads, -1))[:, :, :, -1]


def marked(places: Tensor, reach: int) -> Tensor:
    """bool `[rows, kv_heads, reach]`: the places among `places` int64 `[rows, kv_heads, n]`."""
    found = torch.zeros(*places.shape[:2], reach + 1, dtype=torch.bool, device=places.device)
    return found.scatter_(-1, places + 1, True)[..., 1:]  # NOWHERE marks the column that is dropped
