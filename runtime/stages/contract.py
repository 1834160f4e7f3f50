"""The stages of a compressed cache, as contracts.

    x^ = T^-1( D(E(T x)) + sum_i R_i )          bytes = |E| + sum_i |R_i| + window + tables

A **transform** T is an invertible map of a stream (keys or values) that attention can undo without mapping tokens back: on
the query for keys, on the output for values. A **codec** (encoder E, decoder D) turns a block of tokens into small tensors and
back, and multiplies packed tokens with queries (`scores`) or attention weights (`mix`). A **correction** R_i stores a part of
the codec's error; a codec with corrections is a codec again (`codec/corrected.py`). The stages of `selection.py` decide which
tokens are encoded when, and in which tier they are. Stages are frozen dataclasses; a field is a plain option (readable from
YAML) or a tensor of the artifact for one layer.

Each contract has required members and optional ones. The default of an optional member is what holds for a stage that does
not define it. The engine reads these members and never tests a stage's class, so a new stage needs no change of the engine.

D is `head_dim`. Tensors of a stream have the shape `[batch, kv_heads, tokens, D]`. A **block** is what a page holds: every
field of a codec has the shape `[..., kv_heads, tokens / tokens_per_row, width]`. A **segment** is a run of tokens that were
encoded together and share parameters: one row of a field whose `tokens_per_row` is None. A **tile** is a block as attention
reads it, tokens last: `[..., kv_heads, width, tokens / tokens_per_row]`.
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
    """The size of a segment: number of KV heads, and of tokens (the largest number where segments differ)."""

    heads: int
    tokens: int


class SamplesAtoms(Protocol):
    """A codec whose rows have atoms of their own, sampled from their first chunk (CSR's online dictionary)."""

    @property
    def columns(self) -> int:
        """M, the number of atoms of a row."""
        ...

    @property
    def chunks(self) -> int:
        """How many vectors the channels of a token and head are cut into; an atom has `D / chunks` entries."""
        ...

    def sampled(self, x: Tensor, rng: SeededRng) -> Tensor:
        """Samples a row's atoms, float16 `[M, D / chunks]`, from its first chunk `x [1, kv_heads, T, D]`."""
        ...


class ComponentCodes(Protocol):
    """A codec whose codes stand for fixed numbers, so that a transform maps codes to channels with one matrix.

    A token has n numbers: its codes, or its codes times its size, and its size (`codec/sized.py`).
    """

    def rotated_scores(self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits of `query [..., kv_heads, rows, D]` float32 with a tile of keys before RoPE, which are rotated by their positions'
        `cos` and `sin [..., r/2, tokens]`. A key is `matrix [kv_heads, D, n + 1]` times its n numbers and a 1 after them."""
        ...

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """Sums of a tile's numbers weighted by `weights [..., kv_heads, rows, tokens]` float32: `[..., kv_heads, rows, n]`."""
        ...


class Codec(Protocol):
    """Encodes tokens into packed blocks and decodes them. Stateless: equal tokens give equal bits, in any batch.

    A codec subclasses this. It must have the seven methods up to `mix`; the members after them are optional.
    """

    def token_group(self) -> int:
        """Number of tokens that must be encoded together; 1 if each token is encoded independently."""
        ...

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """Storage of a block for a model of `dtype`; `fp32_params` keeps parameters in float32 (values beyond float16).

        Raises ValueError without a `segment`, i.e. for blocks of any number of tokens, if the codec has fields of a whole segment.
        """
        ...

    def fp32_params(self, x: Tensor) -> bool:
        """Whether parameters of tokens like `x` need float32 (may wait for the device)."""
        ...

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """Encodes `x [batch, kv_heads, tokens, head_dim]` into a block; `fp32_params=None` uses `fp32_params(x)`."""
        ...

    def decode(self, block: Block, channels: int) -> Tensor:
        """Decodes a block into x^, float32 `[..., kv_heads, tokens, channels]`."""
        ...

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits `[..., kv_heads, rows, tokens]` of `query [..., kv_heads, rows, head_dim]` float32 with a tile of packed keys."""
        ...

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums `[..., kv_heads, rows, head_dim]` of a tile of packed values by `weights [..., kv_heads, rows, tokens]` float32."""
        ...

    # Optional: how it encodes.

    def encode_pair(self, other: "Codec", pair: tuple[Tensor, Tensor], fp32_params: bool) -> tuple[Block, Block] | None:
        """Encodes the first of two tensors `[batch, kv_heads, tokens, head_dim]`, and the second with codec `other`, in one call;
        None: the caller encodes one after the other."""
        return None

    def error_bound(self, x: Tensor) -> Tensor | None:
        """The largest |x - x^| for each value of `x [batch, kv_heads, tokens, head_dim]`, float32, which tests check. None: no
        bound is declared, as with corrections, which have tests of their own."""
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
        """Whether rows must be encoded one at a time, because the rounding of matrix products depends on their shape."""
        return False

    @property
    def piece(self) -> int | None:
        """Number of values that are encoded at once on a CPU, so that temporaries stay in its caches; None: a whole block."""
        return None

    @property
    def asks_extremes(self) -> bool:
        """Whether `fp32_params` depends only on the least and the largest value of the tokens: it may then be called with these two
        instead of the tokens, once they are on the host."""
        return False

    @property
    def fuses_transform(self) -> bool:
        """Whether `encode` takes a third argument, `prologue`, by which it transforms and gathers tokens while it encodes them."""
        return False

    def encode_projected(self, x: Tensor, projection: Projection) -> Block | None:
        """Encodes the components of `x [batch, kv_heads, tokens, head_dim]` with a kernel that also computes these; None if there
        is none: the caller computes them and calls `encode`."""
        return None

    def encodes_as_they_lie(self, x: Tensor) -> bool:
        """Whether tokens like `x` are encoded on their device without a temporary copy of them, such as one in float32."""
        return False

    @property
    def sampling(self) -> SamplesAtoms | None:
        """The codec that samples atoms from each row's first chunk; None if there is none."""
        return None

    def bound(self, online: Tensor) -> "Codec":
        """Returns the codec for rows whose sampled atoms are `online [rows, M, D / chunks]`."""
        return self

    def with_seed(self, seed: int, layer: int) -> "Codec":
        """Returns the codec with its random numbers seeded by `seed` and `layer`."""
        return self

    # Optional: how attention reads it. Without any of these a tile is read by `scores` and `mix`.

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel reads its pages, through `packed` or `sparse_pages`; if none does, `compress` warns once."""
        return False

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream | None:
        """Its fields in `pages`, each `[pages, kv_heads, rows, width]`, as `kernels/attend` reads them; None where it does not.

        `shared` has the parameters that all tokens of a row share, in a tile's layout.
        """
        return None

    def sparse_pages(self, pages: Block) -> SparsePages | None:
        """Its fields in `pages` as `kernels/desparsify_attend` reads them; None if they are not sparse pairs."""
        return None

    @property
    def component_codes(self) -> ComponentCodes | None:
        """The codec itself if its codes stand for fixed numbers, so that one matrix maps a tile's codes to channels; else None."""
        return None

    # Optional: corrections around it.

    @property
    def corrections(self) -> "Corrected | None":
        """The codec itself if it holds corrections besides another codec's block; else None."""
        return None

    @property
    def uncorrected(self) -> "Codec":
        """The codec without its corrections."""
        return self

    def residual_form(self, head_dim: int) -> str | None:
        """The name by which the artifact has low-rank bases of this codec's error, such as "1x*.4"; None: the fit measures none."""
        return None

    # Optional: export.

    onnx_writer: ClassVar[str | None] = None
    """The name of its ONNX writer in `calib/export/onnx/codec.py`; None if it cannot be exported to ONNX."""


class Transform(Protocol):
    """y = T x before encoding. `forward` and `inverse` act on tokens; with the folds attention works on y itself.

    A transform subclasses this. It must have the five methods up to `tensors`; the members after them are optional.
    """

    def forward(self, x: Tensor) -> Tensor:
        """y of `x [..., kv_heads, tokens, head_dim]`: float32 of the same shape, or with a basis' components as last axis."""
        ...

    def inverse(self, y: Tensor) -> Tensor:
        """Undoes `forward`."""
        ...

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """(q', constant) such that q.x = q'.y + constant; `constant` is `[..., kv_heads, rows, 1]` or None."""
        ...

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum_t p_t x_t from `mixed` = sum_t p_t y_t `[..., kv_heads, rows, head_dim]` and `mass` = sum_t p_t `[..., rows, 1]`."""
        ...

    def tensors(self) -> list[Tensor]:
        """Its tensors, which all sequences share, for the memory report."""
        ...

    def channel_map(self) -> ChannelMap | None:
        """`inverse` in the form that a kernel folds into queries and outputs; None unless each channel is mapped on its own."""
        return None

    def prologue(self) -> Prologue | None:
        """`forward` in the form that a quantiser applies while it encodes; None unless each channel is mapped on its own."""
        return None

    def projection(self) -> Projection | None:
        """`forward` in the form that a kernel applies while it encodes components; None for a transform without a basis."""
        return None

    @property
    def growth(self) -> float:
        """The largest factor by which the largest magnitude of a token can increase in `forward`, where channels are mixed; 1 where
        they are not."""
        return 1.0

    @property
    def measured(self) -> "Measured | None":
        """The `Measured` recipe itself if parameters are measured on each row's first chunk; None if they hold for all rows."""
        return None

    @property
    def key_bias(self) -> "WithoutBias | None":
        """The transform itself if a part of keys that depends only on their positions is subtracted before it, and accounted for
        in attention; else None."""
        return None

    @property
    def components(self) -> int | None:
        """The width of y; None: the same as x has."""
        return None

    def of_codes(self) -> Tensor | None:
        """The matrix that maps a token's numbers (`ComponentCodes`) and a 1 after them to x^: float32 `[kv_heads, D, n + 1]`; None
        if there is none."""
        return None

    def fold_codes(self, mixed: Tensor, mass: Tensor) -> Tensor | None:
        """`fold_output` for weighted sums of tokens' numbers, if there is `of_codes`; else None."""
        return None

    def code_fold(self) -> CodeFold | None:
        """The tensors with which a kernel does `fold_codes`; None if there is no `of_codes`."""
        return None

    def rope_tables(self, coarse: Tensor, fine: Tensor) -> RopeTables | None:
        """The tensors with which a kernel rotates keys decoded from codes; `coarse` and `fine` are cos and sin (`RopeTables`)."""
        return None
