"""The stages of a compressed cache, as contracts (ARCHITECTURE, "The algebra").

    x^ = T^-1( D(E(T x)) + sum_i R_i )          bytes = |E| + sum_i |R_i| + window + tables

A **transform** is an invertible map of a stream (keys or values) that attention can undo on its own side: on the query
for keys, on the output for values. A **codec** turns a block of tokens into small tensors and back, and can meet a query
or attention weights without decoding. A **correction** stores what a codec got wrong; with it a codec is a codec again
(`codec/corrected.py`). A **schedule** says how many of a row's tokens are encoded, in order. A **saliency**
scores tokens by the attention they get, and a **tiering** says how many of a row's tokens lie in each of several tiers.
Stages are frozen dataclasses; what they hold is either a plain option (readable from YAML) or a tensor of the artifact,
bound for a layer.

Tensors of a stream have the shape `[batch, kv_heads, tokens, head_dim]`. A **block** is what a page holds: every field
of a codec has the shape `[..., kv_heads, tokens / tokens_per_row, width]`. A **segment** is a run of tokens that were encoded
together and share numbers: one row of a field whose `tokens_per_row` is None. A **tile** is a block as attention reads it,
tokens last: `[..., kv_heads, width, tokens / tokens_per_row]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from calib.kernels.quantise.operation import Before

Block = Mapping[str, Tensor]


class Segment(NamedTuple):
    """The size of a segment: KV heads and tokens (of segments of several sizes the largest)."""

    heads: int
    tokens: int


@dataclass(frozen=True)
class Field:
    """Storage of one part of encoded tokens: rows of `width` numbers of `dtype` for every KV head, or `shared` by them all."""

    tokens_per_row: int | None  # None: one row for a whole segment
    width: int
    dtype: torch.dtype
    kind: str  # the line of the memory report: one of `memory.KINDS`
    shared: bool = False

    def row_bytes(self, kv_heads: int) -> int:
        """Bytes of a row, for all KV heads."""
        return self.width * self.dtype.itemsize * (1 if self.shared else kv_heads)

    def bytes_per_token(self, kv_heads: int = 1, segment: int | None = None) -> float:
        """Bytes of one token of so many KV heads; of what a segment of so many tokens shares, its part."""
        tokens = self.tokens_per_row or segment
        assert tokens, "a number of a whole segment is in no token"
        return self.row_bytes(kv_heads) / tokens


class Codec(Protocol):
    """Tokens -> packed block -> tokens. Stateless: the same tokens give the same bits anywhere."""

    def token_group(self) -> int:
        """Tokens that must be encoded together (1 where each token stands alone)."""
        ...

    def fields(
        self, head_dim: int, dtype: torch.dtype, wide: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """Storage of a block for a model of `dtype`; `wide` keeps parameters in float32 (values beyond float16).

        Without a `segment` tokens come in any numbers, and what a segment would share is refused with a ValueError.
        """
        ...

    def wide(self, x: Tensor) -> bool:
        """Whether parameters of tokens like `x` need float32 (may wait for the device)."""
        ...

    def encode(self, x: Tensor, wide: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]` -> block; `wide=None` asks `wide(x)`."""
        ...

    def decode(self, block: Block, channels: int) -> Tensor:
        """Block -> x^, float32 `[..., kv_heads, tokens, head_dim]`."""
        ...

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, head_dim]` float32 against the packed keys -> logits `[..., kv_heads, rows, tokens]`."""
        ...

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times the packed values -> `[..., kv_heads, rows, head_dim]`."""
        ...


class Transform(Protocol):
    """y = T x before encoding. `forward` and `inverse` act on tokens; the folds let attention work on y itself."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., kv_heads, tokens, head_dim]` -> float32 of the same shape, or of a basis' components in place of channels."""
        ...

    def inverse(self, y: Tensor) -> Tensor:
        """Undoes `forward`."""
        ...

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """(q', constant): q.x = q'.y + constant; `constant` is `[..., kv_heads, rows, 1]` or None."""
        ...

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum_t p_t x_t from `mixed` = sum_t p_t y_t `[..., kv_heads, rows, head_dim]` and `mass` = sum_t p_t `[..., rows, 1]`."""
        ...

    def tensors(self) -> list[Tensor]:
        """Tensors shared by all sequences, for the memory report."""
        ...


class ChannelMap(Transform, Protocol):
    """A transform that treats every channel alone."""

    def before(self) -> Before:
        """`forward`, as a quantiser does it on the way to the codes."""
        ...


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
    """Attention mass -> scores. The mass of a token is the sum of its column over the query rows that were looked at."""

    def scores(self, mass: Tensor, seen: Tensor) -> Tensor:
        """`mass [..., kv_heads, tokens]` and how many of the rows have `seen [..., tokens]` each -> scores like `mass`."""
        ...


class Tiering(Protocol):
    """How many tokens lie where. Depends on a row's length and the length of its prompt alone, so that all layers and
    heads agree, and nobody has to ask the device."""

    def held(self, length: int, prompt: int) -> list[int]:
        """Tokens of each tier, best first, once a row holds `length`."""
        ...

    def rewritten(self, tier: int) -> bool:
        """Whether slots of the tier are used again for other tokens."""
        ...

    def exact(self, length: int, prompt: int) -> int:
        """Tokens in the exact window then: the newest, in no tier yet, and sinks."""
        ...
