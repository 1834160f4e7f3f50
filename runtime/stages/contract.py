"""The stages of a compressed cache, as contracts (ARCHITECTURE, "The algebra").

    x^ = T^-1( D(E(T x)) + sum_i R_i )          bytes = |E| + sum_i |R_i| + window + tables

A **transform** is an invertible map of a stream (keys or values) that attention can undo on its own side: on the query
for keys, on the output for values. A **codec** turns a block of tokens into small tensors and back, and can meet a query
or attention weights without decoding. A **correction** stores what a codec got wrong; with it a codec is a codec again
(`codec/corrected.py`). Which tokens are encoded when, and which lie where, is said by the stages of `selection.py`.
Stages are frozen dataclasses; what they hold is either a plain option (readable from YAML) or a tensor of the artifact,
bound for a layer.

Each contract has a part that a stage must have and a part that it may have: optional members, with what holds where a stage
says nothing. The engine asks a stage what it offers and never which class it is, so a new stage changes no line of it.

Tensors of a stream have the shape `[batch, kv_heads, tokens, head_dim]`. A **block** is what a page holds: every field
of a codec has the shape `[..., kv_heads, tokens / tokens_per_row, width]`. A **segment** is a run of tokens that were encoded
together and share numbers: one row of a field whose `tokens_per_row` is None. A **tile** is a block as attention reads it,
tokens last: `[..., kv_heads, width, tokens / tokens_per_row]`.
"""

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from calib.kernels.attend.operation import ChannelMap, CodeFold, PackedStream, RopeTables
from calib.kernels.components.projection import Projection
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.quantise.prologue import Prologue
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.seeded_rng import SeededRng

if TYPE_CHECKING:
    from calib.runtime.stages.codec.corrected import Corrected
    from calib.runtime.stages.transform.measured import Measured
    from calib.runtime.stages.transform.without_bias import WithoutBias


class Segment(NamedTuple):
    """The size of a segment: KV heads and tokens (of segments of several sizes the largest)."""

    heads: int
    tokens: int


class SamplesAtoms(Protocol):
    """A codec whose rows have atoms of their own, sampled from their first chunk (CSR's online dictionary)."""

    @property
    def columns(self) -> int:
        """M, atoms of a row."""
        ...

    @property
    def chunks(self) -> int:
        """Vectors of a token and head: an atom has `head_dim / chunks` entries."""
        ...

    def sampled(self, x: Tensor, rng: SeededRng) -> Tensor:
        """`x [1, kv_heads, T, D]` -> atoms float16 `[M, D / chunks]`."""
        ...


class ComponentCodes(Protocol):
    """A codec whose codes stand for fixed numbers, so that a transform can go from codes to channels in one product.

    Of a token there are n numbers: its codes, or its codes times its size and the size (`codec/sized.py`).
    """

    def turned_scores(self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`query [..., kv_heads, rows, D]` float32 times keys before RoPE, which `cos` and `sin [..., r/2, tokens]` turn: they
        are `matrix [kv_heads, D, n + 1]` times the numbers of a tile and a 1 behind them."""
        ...

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times the numbers of a tile: `[..., kv_heads, rows, n]`."""
        ...


class Codec(Protocol):
    """Tokens -> packed block -> tokens. Stateless: the same tokens give the same bits anywhere.

    A codec subclasses this. It must have the seven methods up to `mix`; what follows them it may have.
    """

    def token_group(self) -> int:
        """Tokens that must be encoded together (1 where each token stands alone)."""
        ...

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """Storage of a block for a model of `dtype`; `fp32_params` keeps parameters in float32 (values beyond float16).

        Without a `segment` tokens come in any numbers, and what a segment would share is refused with a ValueError.
        """
        ...

    def fp32_params(self, x: Tensor) -> bool:
        """Whether parameters of tokens like `x` need float32 (may wait for the device)."""
        ...

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]` -> block; `fp32_params=None` asks `fp32_params(x)`."""
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

    # Optional: how it encodes.

    def encode_pair(self, other: "Codec", pair: tuple[Tensor, Tensor], fp32_params: bool) -> tuple[Block, Block] | None:
        """What `encode` gives for the first of two tensors `[batch, kv_heads, tokens, head_dim]`, and the `other` codec's for the
        second, at once; None: one after the other is as well."""
        return None

    def error_bound(self, x: Tensor) -> Tensor | None:
        """The largest |x - x^| for each value of `x [batch, kv_heads, tokens, head_dim]`, float32: what the laws measure. None: it
        declares none, as corrections do, which have laws of their own."""
        return None

    @property
    def exact(self) -> bool:
        """Whether every bit is kept; such a tier is not quantised and needs no correction."""
        return False

    @property
    def joins_heads(self) -> bool:
        """Whether a head's codes depend on the other heads of the token, or of its segment."""
        return False

    @property
    def over_all_tokens(self) -> bool:
        """Whether all tokens of a block share parameters: a block is then never encoded in pieces."""
        return False

    @property
    def row_by_row(self) -> bool:
        """Whether rows must be encoded one at a time, because products are rounded by the shape of what they are done on."""
        return False

    @property
    def piece(self) -> int | None:
        """Values that are encoded at once on a CPU, so that temporaries stay in its caches; None: a whole block."""
        return None

    @property
    def asks_extremes(self) -> bool:
        """Whether `fp32_params` follows from the least and the largest number of its tokens: it may then be asked of these two in
        place of the tokens, once they have come to the host."""
        return False

    @property
    def fuses_transform(self) -> bool:
        """Whether `encode` takes a third argument, `before`, and transforms and gathers tokens while it encodes them."""
        return False

    def encode_projected(self, x: Tensor, projection: Projection) -> Block | None:
        """What `encode` makes of the components of `x [batch, kv_heads, tokens, head_dim]`, by a kernel that makes these as well;
        None: by `encode`."""
        return None

    def encodes_as_they_lie(self, x: Tensor) -> bool:
        """Whether tokens like `x` are encoded on their device without another copy of them, in float32 above all."""
        return False

    @property
    def sampling(self) -> SamplesAtoms | None:
        """The codec that samples atoms from each row's first chunk, where there is one."""
        return None

    def bound(self, online: Tensor) -> "Codec":
        """The same for rows whose sampled atoms are `online [rows, M, D / chunks]`."""
        return self

    def with_seed(self, seed: int, layer: int) -> "Codec":
        """The same, what draws drawing as this layer does."""
        return self

    # Optional: how attention reads it. Without any of these a tile is read by `scores` and `mix`.

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel reads its pages, by `packed` or by `sparse_pages`; `compress` says once where none does."""
        return False

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """Its fields in `pages`, each `[pages, kv_heads, rows, width]`, as `kernels/attend` reads them; None where it does not.

        `shared` is what a row's tokens have in common, as a tile of one.
        """
        return None

    def sparse_pages(self, pages: Block) -> SparsePages | None:
        """Its fields in `pages` as `kernels/desparsify_attend` reads them; None where they are no sparse pairs."""
        return None

    @property
    def component_codes(self) -> ComponentCodes | None:
        """The codec itself, where its codes stand for fixed numbers: a tile goes from codes to channels in one product."""
        return None

    # Optional: corrections around it.

    @property
    def corrections(self) -> "Corrected | None":
        """The codec itself, where it holds corrections besides another codec's block."""
        return None

    @property
    def uncorrected(self) -> "Codec":
        """The codec without its corrections."""
        return self

    def residual_form(self, head_dim: int) -> str | None:
        """How the artifact names the bases of what this codec gets wrong ("1x*.4"); None: the fit measures none."""
        return None

    # Optional: export.

    onnx_writer: ClassVar[str | None] = None
    """The name in `calib/export/onnx/codec.py` of what writes it as graphs; None: nothing does."""


class Transform(Protocol):
    """y = T x before encoding. `forward` and `inverse` act on tokens; the folds let attention work on y itself.

    A transform subclasses this. It must have the five methods up to `tensors`; what follows them it may have.
    """

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

    def channel_map(self) -> ChannelMap | None:
        """`inverse`, as a kernel folds it into queries and mixtures; None for a transform that does not treat channels alone."""
        return None

    def prologue(self) -> Prologue | None:
        """`forward`, as a quantiser does it on the way to the codes; None for a transform that does not treat channels alone."""
        return None

    def projection(self) -> Projection | None:
        """`forward`, as a kernel does it on the way to the codes of components; None for a transform without a basis."""
        return None

    @property
    def measured(self) -> "Measured | None":
        """None: its numbers hold for all rows. See `Measured`."""
        return None

    @property
    def key_bias(self) -> "WithoutBias | None":
        """The transform itself, where a part of keys that follows from their positions is taken off before it, and given back by
        attention."""
        return None

    @property
    def components(self) -> int | None:
        """The width of y; None: as many as channels, each of which is one channel's."""
        return None

    def of_codes(self) -> Tensor | None:
        """What makes x^ of a token's numbers (`ComponentCodes`) and a 1 behind them: float32 `[kv_heads, D, n + 1]`; None: nothing
        does."""
        return None

    def fold_codes(self, mixed: Tensor, mass: Tensor) -> Tensor | None:
        """`fold_output` of what codes were mixed to, where there is `of_codes`; None: nothing does."""
        return None

    def code_fold(self) -> CodeFold | None:
        """What a kernel needs for `fold_codes`; None: nothing does."""
        return None

    def rope_tables(self, coarse: Tensor, fine: Tensor) -> RopeTables | None:
        """What a kernel needs to rotate keys that it makes of codes; `coarse` and `fine` are cos and sin as `RopeTables` says."""
        return None
