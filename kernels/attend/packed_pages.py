"""Data classes of the attention kernels: packed keys and values in pages, the slots that are read, and parts of a softmax.

D is the number of channels of a head, R the number of query rows of a KV head, W the number of int16 words of a token.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from calib.kernels.pack.reference import Widths

EXACT = 16  # `bits` of tokens that are not quantised
MOST_RANK = 16  # most low-rank coefficients of a token: each takes one operation per token and query row
STRIDE = 64  # RoPE tables split a position into a multiple of this and a remainder
SIZE_BITS = 4  # bits of the number i of a token's size s = 2^((i - SIZE_OF_ONE) / 2)
SIZE_OF_ONE = 5


@dataclass(frozen=True)
class LowRankTerm:
    """Low-rank part of tokens, added to what their codes decode to: x^ = D + A B (GEAR, arXiv:2403.05527, eq. 6).
    A `map` of the stream applies to the sum.

    Args:
        coefficients: A, float16 or float32 `[pages, kv_heads or 1, page_tokens, r]`.
        basis: B, float16 or float32 `[rows or 1, kv_heads, r, D]`.
    """

    coefficients: Tensor
    basis: Tensor


@dataclass(frozen=True)
class ChannelMap:
    """Affine map of each channel: x = scale y + zero, or y / scale + zero with `divides`. `scale` and `zero` have any float dtype
    and one shape, `[rows or 1, kv_heads or 1, 1, D or 1]` or without leading axes; None stands for 1 and 0."""

    scale: Tensor | None = None
    zero: Tensor | None = None
    divides: bool = False


@dataclass(frozen=True, eq=False)
class PackedStream:
    """Keys or values of a tier in pages. Keep the object as long as the tensors do not move: it caches what launches share
    (`worked_out`).

    Args:
        bits: bits of a code, or the widths of a word's fields, or `EXACT` for tokens that are not quantised.
        pages: int16 words `[pages, kv_heads, page_tokens, W]`, or exact tokens `[pages, kv_heads, page_tokens, D]`.
        channels: D; with `counts`, P * max(counts), P codes of a word: queries and mixtures are in plane form
            (`kernels/pack/heads.py`).
        parameters: float16 `[pages, kv_heads or 1, page_tokens / g_t, 2 D / g_c]` for groups of g_t tokens x g_c channels, scales
            before zero points; None: a code stands for its integer value.
        group_tokens: g_t.
        fixed: scale and zero point of all codes of a row, head or channel, where `parameters` is None: broadcast against
            `[rows, kv_heads, R, D]`.
        counts: words of each head, where the words of all heads lie in one row: pages are then `[pages, 1, page_tokens,
            sum(counts)]`. None: each head has its own rows. Mixtures of channels beyond a head's words are finite but undefined.
        scales: a factor of each channel of a page, float16 `[pages, kv_heads, 1, D]`, applied after codes and parameters; or None.
        ranked: low-rank part of the tokens, or None.
        sizes: a factor s of each token, only for codes without parameters; or None. Stored as numbers of `SIZE_BITS` bits, four
            heads to an int16 word or two to a uint8 word, head h in word h % W: `[pages, 1, page_tokens, W]`.
        trellis: words (of all heads in one row) hold trellis-coded levels (`kernels/trellis`): a code is then the number of its
            level, which has one bit more than its field.
        map: affine map of the channels, applied after codes, parameters and `fixed`; or None. On a GPU only, for tokens without
            `sizes`, not for keys that are rotated, and for values with `ranked` only together with `terms` (`operation.py`).
    """

    bits: int | Widths
    pages: Tensor
    channels: int
    parameters: Tensor | None = None
    group_tokens: int = 1
    fixed: tuple[Tensor, Tensor] | None = None
    counts: tuple[int, ...] | None = None
    scales: Tensor | None = None
    ranked: LowRankTerm | None = None
    sizes: Tensor | None = None
    trellis: bool = False
    map: ChannelMap | None = None

    @cached_property
    def without_fixed(self) -> "PackedStream":
        """This stream with `fixed` set to None, for callers that apply `fixed` themselves."""
        return self if self.fixed is None else replace(self, fixed=None)

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """Cache of what launches over these pages have in common; keys say what it is and name the other stream."""
        return {}


@dataclass(frozen=True)
class RopeTables:
    """How to rebuild keys that are stored as codes c of N components before RoPE: k_t = R_t (mean + size s_t B^T (c_t - L / 2)),
    with R_t the rotation of position t, L the largest code of each component, s_t the token's size or 1. RoPE is half-split and
    rotates the first r channels.

    Args:
        axes: B, float16 `[kv_heads, N, D]`, D even: change of the channels per step of a component's code, in units of `size`.
        size: float32 `[kv_heads, 1, 1]`.
        mean: float32 `[kv_heads, 1, D]`.
        coarse: cos and sin, float32 `[n, 2, r / 2]`, for the positions of slots 0, `STRIDE`, 2 `STRIDE`, ... of the whole table;
            where tokens have `positions`, for positions 0, `STRIDE`, ... up to the last that occurs.
        fine: cos and sin, float32 `[STRIDE, 2, r / 2]`, for positions 0 ... `STRIDE` - 1.
    """

    axes: Tensor
    size: Tensor
    mean: Tensor
    coarse: Tensor
    fine: Tensor


@dataclass(frozen=True)
class PredictedValues:
    """Linear prediction of a token's value from the codes c of its key: unit T^T s_t (2 c_t - L), with s_t the key's size and L the
    largest code of each component.

    Args:
        table: T, int16 `[kv_heads, N, D]`; 0 for components beyond a head's own words.
        unit: float32 `[kv_heads, 1, D]`.
        largest: L, float32 `[N]`.
    """

    table: Tensor
    unit: Tensor
    largest: Tensor


@dataclass(frozen=True)
class CodeFold:
    """How to map codes c of N components to value channels: v_t = size B^T c_t + origin; for tokens with sizes s_t, v_t = size B^T
    s_t c_t + s_t (origin - mean) + mean. The prediction from the key, if any, is added.

    Args:
        axes: B, float16 `[kv_heads, N, D]`.
        size: float32 `[kv_heads, 1, 1]`.
        origin: float32 `[kv_heads, 1, D]`.
        mean: float32 `[kv_heads, 1, D]` where values have sizes, else None.
        predicted: prediction from keys with sizes, or None.
    """

    axes: Tensor
    size: Tensor
    origin: Tensor
    mean: Tensor | None = None
    predicted: PredictedValues | None = None


@dataclass(slots=True)
class ExactGroup:
    """Tokens whose values are not quantised.

    `values [rows, kv_heads, n, Dv]` come with `keys [rows, kv_heads, n, D]` or, if the keys are already packed, with their
    `scores`, float32 `[rows, kv_heads, R, n]`. If only some keys are packed, both are given: `scores [rows, kv_heads, R, m]` of m
    packed keys, and `index`, int32 `[rows, n]`: the number of a token's score, or -1 for a token whose key is used. Other keys are
    not read. On a GPU only the first group may have an `index`."""

    values: Tensor
    keys: Tensor | None = None
    scores: Tensor | None = None
    index: Tensor | None = None


@dataclass(slots=True)
class ExactTokens:
    """Exact tokens in groups that are stored separately, such as the window's slots and the new tokens.

    Args:
        groups: all of one dtype.
        hidden: bool `[rows or 1, kv_heads or 1, columns or 1, tokens of all groups]`, True for tokens that are masked for a query
            column (new token); or None.
    """

    groups: tuple[ExactGroup, ...]
    hidden: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of tokens of all groups."""
        return sum(group.values.shape[2] for group in self.groups)


class ExactAttention(NamedTuple):
    """Result of `attend_exact`.

    Attributes:
        output: normalised attention output of all parts, `[rows, kv_heads, R, Dv]`.
        normaliser: log-sum-exp of each query row's scores over all parts, float32 `[rows, kv_heads, R, 1]`, if requested.
        scores: scores of the exact tokens of all groups, -inf where hidden, float32 `[rows, kv_heads, R, n]`, if requested.
    """

    output: Tensor
    normaliser: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class PageSpan:
    """Slots that each row attends: the first `used` slots of the pages in its page table.

    Args:
        table: page numbers, int32 `[rows, n]`.
        used: number of slots in use, int32 `[rows]`.
        hidden: bool `[rows, kv_heads or 1, slots]`, True for slots that are masked for all queries; or None.
        positions: int32 `[pages, kv_heads, page_tokens, 1]`, position of each token in its row; None: the slot number.
        back: int32 `[rows, columns]`: tokens at this position or before are outside the sliding window of that query column.
        bias: float32 `[rows, kv_heads, R, slots]`, added to the scores; or None.
    """

    table: Tensor
    used: Tensor
    hidden: Tensor | None = None
    positions: Tensor | None = None
    back: Tensor | None = None
    bias: Tensor | None = None


@dataclass(slots=True)
class Attended:
    """A part of a softmax over some of the tokens, all float32.

    `top [rows, kv_heads, R, 1]` is the largest score (finite even if all are hidden), `mass` = sum exp(score - top), of the same
    shape, `mixed` = sum exp(score - top) v, `[rows, kv_heads, R, D]`. If requested: `scores [rows, kv_heads, R, slots]`, -inf where
    hidden, and `ahead [rows, kv_heads, R, n]`, scores without soft cap and mask of packed keys behind the attended slots. Parts of
    several runs may be unmerged: then `top`, `mass` and `mixed` have an axis of runs before R."""

    top: Tensor
    mass: Tensor
    mixed: Tensor
    scores: Tensor | None = None
    ahead: Tensor | None = None

    @property
    def runs(self) -> int:
        """Number of unmerged parts; 1 if the part is merged."""
        return 1 if self.top.ndim == 4 else self.top.shape[2]
