"""What a layer keeps its tokens in, as a contract: the layer knows transformers, the store knows pages.

A **plan** is what a method decides for one layer: stages, no tokens. It opens a **store**, which attends over what it
holds and takes new tokens in. There are two kinds: `ordered` (a token lies where it stands in the row) and `tiered`
(a token lies in the tier that its importance gave it).
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from calib.runtime.attend.request import AttendRequest
from calib.runtime.files.state import State
from calib.runtime.held_tier import HeldTier
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.rotation import Rotation
from calib.runtime.stages.contract import Codec

# A stream's name, its transform (or what measures one) and its codec -> another codec.
Recoding: TypeAlias = Callable[[str, Any, Codec], Codec]


@dataclass(frozen=True)
class LayerContext:
    """Which layer a store belongs to: its number among the compressed ones, the cache's seed, the model's RoPE."""

    layer: int = 0
    seed: int = 0
    rotation: Rotation | None = None


@dataclass
class Footprint:
    """Bytes of one layer from shapes: by kind, of one more token, and the values (keys and values) of a token; apart from
    these the bytes in host memory."""

    kinds: Counter[str] = field(default_factory=Counter)
    marginal: float = 0.0
    values: int = 0
    host: int = 0


class Store(Protocol):
    """Tokens of one layer, for all rows. All tensors are `[rows, heads or kv_heads, tokens, head_dim]`."""

    @property
    def plan(self) -> Any:
        """The plan that opened it, on the store's device."""
        ...

    @property
    def observes(self) -> bool:
        """Whether storing needs the queries: what is attended decides where tokens go."""
        ...

    def prepare(self, forward: Forward) -> None:
        """Room for what the forward adds, before it is attended."""
        ...

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention of the asked rows, `[rows, heads, n, D]`; changes nothing of what is stored but what its tokens have
        been given, where `request.observe` is."""
        ...

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Takes the forward's tokens in; the keys and values of all rows, padding included."""
        ...

    def graph_key(self, forward: Forward) -> Hashable | None:
        """What a decode step shares with the others of its block, but for numbers in `Forward.tensor`: the shapes of all it
        does and the memory it does it in. None for a step that moves or shares memory."""
        ...

    def encodes(self, forward: Forward) -> bool:
        """Whether a step that has a `graph_key` does more than the others of its block, which goes on behind it: it encodes tokens,
        in memory that stays."""
        ...

    def branch(self, forward: Forward) -> Hashable:
        """What numbers of the host decide, in steps that share a `graph_key` and are in no graph: launches are the same where it
        is."""
        ...

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]`; `kept` are the pages that stay where a table numbered them anew."""
        ...

    def to(self, device: torch.device) -> None:
        """Moves everything to `device`."""
        ...

    def state(self) -> State:
        """All that it has stored, for a file."""
        ...

    def restore(self, state: State) -> None:
        """Of an empty store that the same plan has opened, for rows that are restored already; raises StateError.

        Called twice: on the meta device, where shapes and numbers are compared and nothing is allocated, and then in earnest.
        """
        ...

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys behind RoPE and values of a row, `[kv_heads, length, head_dim]` in the model's dtype, in order: what codes say, and
        exact ones. Of a store that has every token, and whose plan does not observe."""
        ...

    def footprint(self) -> Footprint:
        """What this layer weighs, from shapes alone."""
        ...

    def tiers_of(self, row: int) -> list[HeldTier]:
        """Which tokens of a row lie where."""
        ...

    def on_host(self) -> list[Tensor]:
        """Tensors that lie in host memory on purpose."""
        ...

    def overflowed_outliers(self) -> int:
        """Outliers beyond calibrated thresholds that found no slot so far (waits for the device)."""
        ...


class Plan(Protocol):
    """Stages of one layer; frozen.

    A plan subclasses this. It must have the methods up to `recoded`; what follows them it may have.
    """

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for stages that do not fit a head of this width."""
        ...

    def sequences(self, layers: int, sliding: int | None) -> SequenceState:
        """The sequence state that all `layers` of a cache share."""
        ...

    def open(self, keys: Tensor, values: Tensor, sequences: Any, context: LayerContext) -> Store:
        """An empty store; the first keys and values fix shapes, dtype, device and the width of parameters."""
        ...

    def tables(self) -> list[Tensor]:
        """Tensors of the artifact that the stages hold, shared by all rows."""
        ...

    def to(self, device: torch.device) -> "Plan":
        """The same stages with their tables on `device`, in storage of their own."""
        ...

    def codecs(self) -> list[Codec]:
        """Of every stream that the device holds in pages."""
        ...

    def pairs(self, context: LayerContext) -> "list[Any]":
        """The device's tiers, best first, what draws drawing as this layer does: `keys` and `values` of each have a `transform` and
        a `codec`."""
        ...

    def recoded(self, change: Recoding) -> "Plan":
        """The same with other codecs: what `change` makes of a stream's name, its transform and its codec."""
        ...

    # Optional: what it needs.

    @property
    def needs_rope(self) -> str | None:
        """Where attention must know the model's RoPE: what to do if that cannot be followed. None: it need not."""
        return None

    @property
    def needs_token_ids(self) -> bool:
        """Whether storing must know token ids."""
        return False

    @property
    def lacks_special_ids(self) -> bool:
        """Whether it must be told which token ids are special before it can be used."""
        return False

    def with_special_ids(self, special_ids: tuple[int, ...]) -> "Plan":
        """The same, these token ids being the special ones, where it lacks them."""
        return self

    @property
    def lacks_key_bias(self) -> bool:
        """Whether it must be told the bias of the layer's key projection before it can be used."""
        return False

    def with_key_bias(self, bias: Tensor) -> "Plan":
        """The same, `bias [kv_heads, head_dim]` being that, where it lacks it."""
        return self

    @property
    def speculative(self) -> bool:
        """Whether a decode step takes a speculative token along."""
        return False

    # Optional: what it does.

    @property
    def on_host(self) -> bool:
        """Whether every token lies in host memory."""
        return False

    @property
    def in_order(self) -> bool:
        """Whether a token's slot on the device follows from its position; else it lies in a tier."""
        return False

    @property
    def evicts(self) -> bool:
        """Whether the device drops tokens, or hides some from a query."""
        return False

    @property
    def observes(self) -> bool:
        """Whether attention decides what is stored."""
        return False

    @property
    def joins_heads(self) -> bool:
        """Whether what is stored of a KV head depends on the others."""
        return any(codec.joins_heads for codec in self.codecs())

    @property
    def relocates(self) -> bool:
        """Whether some tokens are attended at other positions than their own."""
        return False

    @property
    def before_rope(self) -> bool:
        """Whether keys are encoded as they were before RoPE."""
        return False

    @property
    def encoding_chunk(self) -> int | None:
        """Tokens of a row that are attended and stored before the next ones of the same forward are attended; None: all."""
        return None

    @property
    def by_forwards(self) -> bool:
        """Whether it matters in which forwards tokens arrive: attention decides, or a prompt is encoded as a whole."""
        return False

    @property
    def differs_in_prompt(self) -> bool:
        """Whether a prompt's tokens take other room than those behind it."""
        return False

    def with_positions(self) -> "Plan":
        """The same, every token's position known."""
        return self

    def in_segments(self, first: Recoding, rest: Recoding) -> "Plan | None":
        """The same with chunks as segments, other codecs in the first and in the rest; None where tokens come in no chunks."""
        return None
