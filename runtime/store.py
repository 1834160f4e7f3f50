"""What a layer keeps its tokens in, as a contract: the layer knows transformers, the store knows pages.

A **plan** is what a method decides for one layer: stages, no tokens. It opens a **store**, which attends over what it
holds and takes new tokens in. There are two kinds: `ordered` (a token lies where it stands in the row) and `tiered`
(a token lies in the tier that its importance gave it).
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from calib.runtime.beside import Beside
from calib.runtime.logits import Logits
from calib.runtime.rotation import Rotation
from calib.runtime.rows import Forward, Rows
from calib.runtime.state import State


class Given(NamedTuple):
    """What a layer is given in one forward: `query [rows, heads, n, D]`, `keys` and `values [rows, kv_heads, n, D]`."""

    query: Tensor
    keys: Tensor
    values: Tensor

    def of_rows(self, rows: range) -> "Given":
        """Some rows of it."""
        return Given(*(part[rows.start : rows.stop] for part in self))

    def of_columns(self, columns: Tensor | slice) -> "Given":
        """Some columns of it."""
        return Given(*(part[:, :, columns] for part in self))


@dataclass(frozen=True)
class Place:
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

    def attend(
        self,
        forward: Forward,
        rows: range,
        logits: Logits,
        given: Given,
        observe: bool,
        beside: Beside | None = None,
    ) -> Tensor:
        """Attention of `rows` over everything held and what they are `given`, no padding; changes nothing stored.

        With `observe` what storing will need of the probabilities is kept until `store`. What lies `beside` is attended, too.
        """
        ...

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Takes the forward's tokens in; the keys and values of all rows, padding included."""
        ...

    def block(self, forward: Forward) -> Hashable | None:
        """What a decode step shares with the others of its block, but for numbers in `Forward.tensor`: the shapes of all it
        does and the memory it does it in. None for a step that encodes a block, or moves or shares memory."""
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
        """Of an empty store that the same plan has opened, for rows that are restored already; raises StateError."""
        ...

    def footprint(self) -> Footprint:
        """What this layer weighs, from shapes alone."""
        ...

    def on_host(self) -> list[Tensor]:
        """Tensors that lie in host memory on purpose."""
        ...

    def further(self) -> int:
        """Outliers beyond calibrated thresholds that found no slot so far (waits for the device)."""
        ...


class Plan(Protocol):
    """Stages of one layer; frozen."""

    @property
    def rotation_remedy(self) -> str | None:
        """Where attention must know the model's RoPE: what to do if that cannot be followed. None: it need not."""
        ...

    @property
    def asks_ids(self) -> bool:
        """Whether storing must know token ids."""
        ...

    @property
    def speculative(self) -> bool:
        """Whether a decode step takes a guess along."""
        ...

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for stages that do not fit a head of this width."""
        ...

    def rows(self, layers: int, sliding: int | None) -> Rows:
        """The ledger that all `layers` of a cache share."""
        ...

    def open(self, keys: Tensor, values: Tensor, rows: Any, place: Place) -> Store:
        """An empty store; the first keys and values fix shapes, dtype, device and the width of parameters."""
        ...

    def tables(self) -> list[Tensor]:
        """Tensors of the artifact that the stages hold, shared by all rows."""
        ...

    def to(self, device: torch.device) -> "Plan":
        """The same stages with their tables on `device`, in storage of their own."""
        ...
