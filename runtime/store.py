"""The interfaces of a plan and of a store. `CompressedLayer` deals with transformers, the store with pages.

A **plan** is what a method decides for one layer: its stages, without any tokens. It opens a **store**, which holds one layer's
tokens, attends over them and stores new ones. There are two kinds: `ordered` (a token's slot follows from its position in the
row) and `tiered` (a token is in a tier, mostly by its saliency); `offload` combines one on the host with one on the device.
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

# (name of a stream, its transform or what measures one, its codec) -> another codec.
Recoding: TypeAlias = Callable[[str, Any, Codec], Codec]


@dataclass(frozen=True)
class LayerContext:
    """The layer that a store belongs to: its number among the compressed ones, the cache's seed, the model's RoPE if needed."""

    layer: int = 0
    seed: int = 0
    rotation: Rotation | None = None


@dataclass
class Footprint:
    """Bytes of one layer, computed from shapes: `kinds`, bytes by kind (`memory.KINDS`); `marginal`, bytes of one more token;
    `values`, key and value elements of a token; `host`, bytes in host memory, which no other field counts."""

    kinds: Counter[str] = field(default_factory=Counter)
    marginal: float = 0.0
    values: int = 0
    host: int = 0


class Store(Protocol):
    """Tokens of one layer, for all rows. Tensors are `[rows, heads or kv_heads, tokens, head_dim]`; n new tokens, D = head_dim."""

    @property
    def plan(self) -> Any:
        """The plan that opened this store, with its tables on the store's device."""
        ...

    @property
    def observes(self) -> bool:
        """Whether storing needs the queries, because attention decides where tokens go."""
        ...

    def prepare(self, forward: Forward) -> None:
        """Makes room for what the forward adds; called before `attend`."""
        ...

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention of the rows of the request, `[rows, heads, n, D]`. Stored tokens do not change; where `request.observe` is
        set, the attention that they get is recorded for `store`, or added to their saliency at once."""
        ...

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores the forward's tokens; `keys` and `values` are those of all rows, padding included."""
        ...

    def graph_key(self, forward: Forward) -> Hashable | None:
        """A key that all decode steps of a block share, which differ only in the numbers of `Forward.tensor`: the key stands
        for all shapes and for the memory in use. None for a step that moves memory or writes to shared pages.

        A block is the decode steps between two encodings.
        """
        ...

    def encodes(self, forward: Forward) -> bool:
        """Whether this step, which has a `graph_key`, also encodes tokens, in memory that is not moved. The other steps of its
        block do not, and the block continues after it."""
        ...

    def branch(self, forward: Forward) -> Hashable:
        """A key of the host's decisions in a step outside CUDA graphs: steps with equal `graph_key` and equal `branch` launch
        the same kernels."""
        ...

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]`; `kept`: what `PageTable.permute` returned for each table, for
        `PagePool.keep`."""
        ...

    def to(self, device: torch.device) -> None:
        """Moves everything to `device`."""
        ...

    def state(self) -> State:
        """Returns everything stored, for a file."""
        ...

    def restore(self, state: State) -> None:
        """Fills an empty store of the same plan from `state`; the sequence state is restored already. Raises StateError.

        Called twice: on the meta device, where shapes and numbers are compared and nothing is allocated, and then on the real
        one.
        """
        ...

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values of a row, `[kv_heads, length, head_dim]` in the model's dtype, in order of position:
        encoded tokens are decoded. Only for stores that hold every token and whose plan does not observe attention."""
        ...

    def footprint(self) -> Footprint:
        """Bytes of this layer, computed from shapes alone."""
        ...

    def tiers_of(self, row: int) -> list[HeldTier]:
        """The tiers of a row: how many tokens each holds, which ones, and in how many bits."""
        ...

    def on_host(self) -> list[Tensor]:
        """Tensors that are in host memory on purpose."""
        ...

    def overflowed_outliers(self) -> int:
        """Outliers beyond calibrated thresholds that found no slot so far (synchronises with the device)."""
        ...


class Plan(Protocol):
    """The stages of one layer; frozen.

    Plans subclass this. The methods up to `recoded` are required; those after it are optional.
    """

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for stages that do not fit this head width or dtype."""
        ...

    def sequences(self, layers: int, sliding: int | None) -> SequenceState:
        """The sequence state that all `layers` of a cache share."""
        ...

    def open(self, keys: Tensor, values: Tensor, sequences: Any, context: LayerContext) -> Store:
        """Returns an empty store; `keys` and `values`, the first ones, fix shapes, dtype, device and the width of parameters."""
        ...

    def tables(self) -> list[Tensor]:
        """The artifact's tensors that the stages hold, shared by all rows."""
        ...

    def to(self, device: torch.device) -> "Plan":
        """The same stages with their tables on `device`, in storage of their own."""
        ...

    def codecs(self) -> list[Codec]:
        """The codec of every stream that is stored in pages on the device."""
        ...

    def pairs(self, context: LayerContext) -> "list[Any]":
        """The device's tiers, best first, with random stages seeded for the layer of `context`: `keys` and `values` of each
        have a `transform` and a `codec`."""
        ...

    def recoded(self, change: Recoding) -> "Plan":
        """The same plan with the codecs that `change` returns for a stream's name, its transform and its codec."""
        ...

    # Optional: what it needs.

    @property
    def needs_rope(self) -> str | None:
        """Where attention must know the model's RoPE: the advice to give if that RoPE is not supported. None: not needed."""
        return None

    @property
    def needs_token_ids(self) -> bool:
        """Whether storing needs token ids."""
        return False

    @property
    def lacks_special_ids(self) -> bool:
        """Whether the ids of special tokens must be set before the plan can be used."""
        return False

    def with_special_ids(self, special_ids: tuple[int, ...]) -> "Plan":
        """The same plan with `special_ids` as its special tokens, where it lacks them."""
        return self

    @property
    def lacks_key_bias(self) -> bool:
        """Whether the bias of the layer's key projection must be set before the plan can be used."""
        return False

    def with_key_bias(self, bias: Tensor) -> "Plan":
        """The same plan with the key projection's bias `[kv_heads, head_dim]`, where it lacks it."""
        return self

    @property
    def speculative(self) -> bool:
        """Whether a decode step also has a speculative token."""
        return False

    # Optional: what it does.

    @property
    def on_host(self) -> bool:
        """Whether every token is in host memory."""
        return False

    @property
    def in_order(self) -> bool:
        """Whether a token's slot on the device follows from its position; if not, the token is in a tier."""
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
        """Whether the stored form of a KV head depends on the other heads."""
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
        """How many tokens of a row are attended and stored before the next ones of the same forward are attended; None: all."""
        return None

    @property
    def by_forwards(self) -> bool:
        """Whether the result depends on how tokens are split into forwards: attention decides, or a prompt is encoded as a
        whole."""
        return False

    @property
    def differs_in_prompt(self) -> bool:
        """Whether a prompt's tokens take other room than later ones."""
        return False

    def with_positions(self) -> "Plan":
        """The same plan, in a form that records every token's position."""
        return self

    def in_segments(self, first: Recoding, rest: Recoding) -> "Plan | None":
        """The same plan with chunks as segments, and other codecs in the first segment and in the rest; None without chunks."""
        return None
