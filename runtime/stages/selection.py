"""The stages that choose tokens, as contracts: which are encoded when, which matter, and which lie where.

A **schedule** says how many of a row's tokens are encoded, in order. A **saliency** scores tokens by the attention they get, and a
**tiering** says how many of a row's tokens lie in each of several tiers.
"""

import sys
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from calib.kernels.heavy_hitters.operation import MassRule


class Schedule(Protocol):
    """How much of a row is read in packed form after each forward, and how many exact tokens that can leave."""

    def packed(self, length: int) -> int:
        """Tokens read from pages once a row holds `length`, the others being exact; never decreasing, at most `length`."""
        ...

    def encoded(self, length: int) -> int:
        """Tokens whose codes are in pages by then, at least `packed`: encoding many at once costs little more than one."""
        ...

    def window(self) -> int:
        """Slots of the row's ring of exact tokens: the most that ever stay exact."""
        ...

    def slots(self, length: int) -> int:
        """Leading slots of the ring in use (token t lies in slot t % window) once a row holds `length`."""
        ...


class Saliency(Protocol):
    """Attention mass -> scores. A token's mass is what the observed query rows gave it, summed over the query heads of a
    KV head.

    A saliency subclasses this, and has what differs from a plain sum.
    """

    rule: ClassVar[MassRule] = MassRule()

    def scores(self, mass: Tensor, seen: Tensor) -> Tensor:
        """`mass [..., kv_heads, tokens]` and how many of the rows have `seen [..., tokens]` each -> scores like `mass`."""
        return self.rule.scores(mass, seen)

    def observe(self, mass: Tensor, shown: Tensor) -> None:
        """Takes into `mass`, in place, what one more forward has `shown` of tokens that were held before it."""
        self.rule.observe(mass, shown)

    @property
    def newest(self) -> int | None:
        """How many of a forward's newest query rows are observed; None: all of them, or the probes."""
        return None

    @property
    def counts_rows(self) -> bool:
        """Whether scores depend on how many rows have seen a token."""
        return self.rule.mean

    @property
    def by_budget(self) -> bool:
        """Whether what is observed of a prompt depends on how many tokens are kept."""
        return False

    @property
    def by_neighbours(self) -> bool:
        """Whether a token's score depends on the tokens beside it: it must then be asked for tokens in the order of positions."""
        return False


class NextTokens(NamedTuple):
    """Where the next `tokens` of a row go, one after the other: each is one more in `tier`, or in the exact window where that is
    None, or in nothing that is stored where no tier has this number; no other tier changes."""

    tier: int | None
    tokens: int


NO_END = sys.maxsize  # tokens that go on for ever


class Tiering(Protocol):
    """How many tokens lie where. Depends on a row's length and the length of its prompt alone, so that all layers and
    heads agree, and nobody has to ask the device.

    A tiering subclasses this. It must have the three methods up to `exact`; what follows them it may have.
    """

    def held(self, length: int, prompt: int) -> list[int]:
        """Tokens of each tier, best first, once a row holds `length`."""
        ...

    def rewritten(self, tier: int) -> bool:
        """Whether slots of the tier are used again for other tokens."""
        ...

    def exact(self, length: int, prompt: int) -> int:
        """Tokens in the exact window then: the newest, in no tier yet, and sinks."""
        ...

    def next_tokens(self, length: int, prompt: int) -> NextTokens:
        """Where tokens go behind `length`; what is not said is worked out for each of them."""
        return NextTokens(None, 0)

    def evicts(self, stored: int) -> bool:
        """Whether tokens are dropped where `stored` of its tiers are stored."""
        return False

    @property
    def exact_sinks(self) -> int:
        """A row's first tokens that stay in the exact window for ever."""
        return 0

    @property
    def slots_from(self) -> int | None:
        """The position of the token in slot 0, where the only tier takes a row's tokens in their order; None: in any order."""
        return None

    @property
    def multiple(self) -> int:
        """The only tier gains a row's tokens in their order, always a multiple of so many; 1: in any numbers."""
        return 1

    def in_segments(self, stored: int) -> "tuple[Tiering, list[int]] | None":
        """Where tokens are encoded a chunk at a time: the same with as many tiers again, for the chunks behind the first, and how
        many tokens of a chunk each of those gets. A chunk can then be a segment. None: there are no chunks."""
        return None

    @property
    def shortest_chunk(self) -> int | None:
        """Tokens of the first chunk of the shortest prompt, where there are chunks."""
        return None

    @property
    def by_forwards(self) -> bool:
        """Whether it matters in which forwards tokens arrive, even where no attention decides."""
        return False

    @property
    def fixed_by_prompt(self) -> bool:
        """Whether a prompt's tokens are spread over the tiers otherwise than those that follow."""
        return False

    @property
    def scores_in_order(self) -> bool:
        """Whether the tokens that are scored together always are a stretch of the row, in the order of positions."""
        return False
