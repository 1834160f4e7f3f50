"""The stages that choose tokens, as contracts: when tokens are encoded, how they are scored, and in which tier they are.

A **schedule** determines how many of a row's tokens are encoded, in order. A **saliency** scores tokens by the attention they get,
and a **tiering** determines how many of a row's tokens are in each of several tiers.
"""

import sys
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from calib.kernels.heavy_hitters.operation import MassRule


class Schedule(Protocol):
    """How many tokens of a row are read in packed form after each forward, and how many can remain exact."""

    def packed(self, length: int) -> int:
        """Number of tokens read from pages once a row holds `length`, the others being exact; at most `length`, never falling."""
        ...

    def encoded(self, length: int) -> int:
        """Number of tokens whose codes are in pages then, at least `packed`: encoding many at once costs little more than one."""
        ...

    def window(self) -> int:
        """Slots of the row's ring of exact tokens: the most that ever stay exact."""
        ...

    def slots(self, length: int) -> int:
        """Leading slots of the ring in use (token t is in slot t % window) once a row holds `length`."""
        ...


class Saliency(Protocol):
    """Scores of tokens from attention mass: the attention probabilities that a token got from the observed query rows, summed over
    the query heads of a KV head.

    A saliency subclasses this, and overrides the members in which it differs from a plain sum.
    """

    rule: ClassVar[MassRule] = MassRule()

    def scores(self, mass: Tensor, seen: Tensor) -> Tensor:
        """Scores, shaped like `mass [..., kv_heads, tokens]`; `seen [..., tokens]` is how many observed rows can see each token."""
        return self.rule.scores(mass, seen)

    def observe(self, mass: Tensor, shown: Tensor) -> None:
        """Updates `mass` in place with the mass `shown` that the tokens held before a forward got in it."""
        self.rule.observe(mass, shown)

    @property
    def newest(self) -> int | None:
        """Number of a forward's newest query rows that are observed; None: all rows, or the probes."""
        return None

    @property
    def counts_rows(self) -> bool:
        """Whether scores depend on how many observed rows can see a token."""
        return self.rule.mean

    @property
    def by_budget(self) -> bool:
        """Whether what is observed in a prompt depends on how many tokens are kept (FastGen)."""
        return False

    @property
    def by_neighbours(self) -> bool:
        """Whether a token's score depends on the tokens next to it: `scores` then needs tokens in the order of positions."""
        return False


class NextTokens(NamedTuple):
    """Where the next `tokens` tokens of a row go, one after the other: each adds one to the count of `tier`, or of the exact window
    if `tier` is None, or to no count if `tier` is not a stored tier's number. No other count changes."""

    tier: int | None
    tokens: int


NO_END = sys.maxsize  # for all later tokens


class Tiering(Protocol):
    """How many tokens are in each tier. The counts depend only on a row's length and its prompt's length, so that all layers and
    heads agree, and the host never waits for the device.

    A tiering subclasses this. It must have the three methods up to `exact`; the members after them are optional.
    """

    def held(self, length: int, prompt: int) -> list[int]:
        """Number of tokens of each tier, best first, once a row holds `length` tokens, `prompt` of them in its prompt."""
        ...

    def rewritten(self, tier: int) -> bool:
        """Whether slots of the tier are reused for other tokens."""
        ...

    def exact(self, length: int, prompt: int) -> int:
        """Number of tokens in the exact window then: the newest, which are in no tier yet, and sinks."""
        ...

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """Where the tokens after `length` go; `held` is called for each token that this does not cover."""
        return NextTokens(None, 0)

    def evicts(self, stored: int) -> bool:
        """Whether tokens are dropped if only the first `stored` of its tiers are stored."""
        return False

    @property
    def exact_sinks(self) -> int:
        """Number of a row's first tokens that always stay in the exact window."""
        return 0

    @property
    def slots_from(self) -> int | None:
        """The position of the token in slot 0 if there is one tier that takes a row's tokens in order; None: they have no order."""
        return None

    @property
    def multiple(self) -> int:
        """If a single tier takes a row's tokens in order: the number of which each addition is a multiple; 1: any number."""
        return 1

    def in_segments(self, stored: int) -> "tuple[Tiering, list[int]] | None":
        """If tokens are encoded chunk by chunk: this tiering with `stored` further tiers for the chunks after the first, and the
        number of tokens of such a chunk that each tier gets; a chunk can then be a segment. None: there are no chunks."""
        return None

    @property
    def shortest_chunk(self) -> int | None:
        """Number of tokens of the first chunk for the shortest prompt; None: there are no chunks."""
        return None

    @property
    def by_forwards(self) -> bool:
        """Whether the result depends on how tokens are divided into forwards, even if attention decides nothing."""
        return False

    @property
    def fixed_by_prompt(self) -> bool:
        """Whether a prompt's tokens are distributed over the tiers otherwise than later ones."""
        return False

    @property
    def scores_in_order(self) -> bool:
        """Whether tokens that are scored together are always consecutive in the row, in the order of positions."""
        return False
