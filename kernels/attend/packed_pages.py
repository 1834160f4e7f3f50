"""What attention's kernels read and give: packed keys and values in pages, the slots of them, and a part of a softmax."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from calib.kernels.pack.reference import Widths

EXACT = 16
MOST_RANK = 16  # coefficients of a token: each is an operation of its own for a token and query row
STRIDE = 64  # positions whose turns are another table's row
SIZE_BITS = 4  # of a token's size: it is 2^((i - SIZE_OF_ONE) / 2), i its number
SIZE_OF_ONE = 5


@dataclass(frozen=True)
class LowRankTerm:
    """What tokens have beside their codes, as coefficients of a few vectors: x^ = D + A B (GEAR, arXiv:2403.05527, eq. 6).
    A `map` of the stream is of both.

    Args:
        coefficients: A, float16 or float32 `[pages, kv_heads or 1, page_tokens, r]`.
        basis: B, float16 or float32 `[rows or 1, kv_heads, r, D]`.
    """

    coefficients: Tensor
    basis: Tensor


@dataclass(frozen=True)
class ChannelMap:
    """x = scale y + zero in every channel, or where it `divides` y / scale + zero. Both of any float dtype and of one shape, `[rows
    or 1, kv_heads or 1, 1, D or 1]` or without the first axes; None: 1, and 0."""

    scale: Tensor | None = None
    zero: Tensor | None = None
    divides: bool = False


@dataclass(frozen=True, eq=False)
class PackedStream:
    """Keys or values of a tier in pages. Kept as long as the pages stay where they are, it spares later launches what the first has
    `worked_out`.

    Args:
        bits: of a code, or the widths of a word's fields, or `EXACT`: the tokens as the model made them.
        pages: words int16 `[pages, kv_heads, page_tokens, W]`, or exact tokens `[pages, kv_heads, page_tokens, D]`.
        channels: D; with `counts`, P * max(counts): queries are in plane form, and so is what is mixed (`kernels/pack/heads.py`).
        parameters: float16 `[pages, kv_heads or 1, page_tokens / g_t, 2 D / g_c]`, scales first; None: a code is its number.
        group_tokens: g_t.
        fixed: scale and zero point of all codes of a row's head or channel, where `parameters` is None: broadcast against
            `[rows, kv_heads, R, D]`.
        counts: words of each head, which lie side by side: pages are then `[pages, 1, page_tokens, sum(counts)]`. None: each
            head has a row of its own. What is mixed beyond a head's own words is finite and means nothing.
        scales: c of each page's channels, float16 `[pages, kv_heads, 1, D]`, where a token is c times what its codes and parameters
            say; or None.
        ranked: what the tokens have beside, or None.
        sizes: s of each token, which is s times what its codes say; of codes without parameters, or None. Numbers of `SIZE_BITS`
            bits, four heads to a word of int16 or two to one of uint8, head h in word h % W: `[pages, 1, page_tokens, W]`.
        trellis: whether words, of all heads side by side, are of trellis-coded levels (`kernels/trellis`): a code is then the
            number of its level, one bit longer than its field.
        map: tokens are what it makes of those that codes, parameters and `fixed` say, or None. On a GPU alone, of tokens without
            `sizes`, and not of keys that are turned; of values with `ranked` where `terms` are mixed besides (`operation.py`).
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
        """The same, `fixed` being the caller's."""
        return self if self.fixed is None else replace(self, fixed=None)

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """What launches that read these pages have in common: by what it is, and the other stream."""
        return {}


@dataclass(frozen=True)
class RopeTables:
    """Keys whose codes c are of components before RoPE: k_t = R_t (mean + size s_t B^T (c_t - L / 2)), R_t the rotation of
    position t, L the largest code of each component, s_t the token's size or 1. Half-split RoPE of the first r channels.

    Args:
        axes: B, float16 `[kv_heads, N, D]`, D even: what a step of each component moves the channels, in units of `size`.
        size: float32 `[kv_heads, 1, 1]`.
        mean: float32 `[kv_heads, 1, D]`.
        coarse: cos and sin, float32 `[n, 2, r / 2]`, of the positions of slots 0, `STRIDE`, 2 `STRIDE`, ... of all in
            the table; where tokens have `positions`, of the positions 0, `STRIDE`, ... up to the last that occurs.
        fine: float32 `[STRIDE, 2, r / 2]`: of the positions 0 ... `STRIDE` - 1.
    """

    axes: Tensor
    size: Tensor
    mean: Tensor
    coarse: Tensor
    fine: Tensor


@dataclass(frozen=True)
class PredictedValues:
    """What the codes c of a token's key say of its value: unit T^T s_t (2 c_t - L), s_t the key's size, L the last code of each
    component.

    Args:
        table: T, int16 `[kv_heads, N, D]`; 0 for a component that its head has no word for.
        unit: float32 `[kv_heads, 1, D]`.
        largest: L, float32 `[N]`: twice the middle of each component's codes.
    """

    table: Tensor
    unit: Tensor
    largest: Tensor


@dataclass(frozen=True)
class CodeFold:
    """Values whose codes c are of components: v_t = size B^T c_t + origin, of tokens that have sizes size B^T s_t c_t + s_t (origin
    - mean) + mean; and what is `predicted` of them is added.

    Args:
        axes: B, float16 `[kv_heads, N, D]`.
        size: float32 `[kv_heads, 1, 1]`.
        origin: float32 `[kv_heads, 1, D]`.
        mean: float32 `[kv_heads, 1, D]`, of tokens that have sizes; or None.
        predicted: of keys that have sizes; or None.
    """

    axes: Tensor
    size: Tensor
    origin: Tensor
    mean: Tensor | None = None
    predicted: PredictedValues | None = None


@dataclass(slots=True)
class ExactGroup:
    """Tokens whose values are as the model made them: `values [rows, kv_heads, n, Dv]`, and `keys [rows, kv_heads, n, D]` or, where
    these are packed, their `scores`, float32 `[rows, kv_heads, R, n]`. Where some are packed both are given, of m keys `scores
    [rows, kv_heads, R, m]`, and `index`, int32 `[rows, n]`: a token's number among the scores, or -1 where its key counts. Other
    keys need not be there. On a GPU of the first group alone."""

    values: Tensor
    keys: Tensor | None = None
    scores: Tensor | None = None
    index: Tensor | None = None


@dataclass(slots=True)
class ExactTokens:
    """Groups of exact tokens that lie apart: a window's slots and the new tokens.

    Args:
        groups: all of one dtype.
        hidden: bool `[rows or 1, kv_heads or 1, columns or 1, tokens of all groups]`, those that a query does not see, or None.
    """

    groups: tuple[ExactGroup, ...]
    hidden: Tensor | None = None

    @property
    def count(self) -> int:
        """Tokens of all groups."""
        return sum(group.values.shape[2] for group in self.groups)


class ExactAttention(NamedTuple):
    """What attention over exact tokens and other parts of a softmax gives.

    Attributes:
        output: `[rows, kv_heads, R, Dv]`.
        normaliser: where it was asked for, the log-sum-exp of each query row's scores, of all parts, float32 `[rows, kv_heads, R,
            1]`.
        scores: where they were asked for, of the exact tokens of all groups, -inf where hidden, float32 `[rows, kv_heads, R, n]`.
    """

    output: Tensor
    normaliser: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class PageSpan:
    """Which slots are read, by every row: int32 page numbers `table [rows, n]`, and `used [rows]` slots of them.

    Args:
        hidden: bool `[rows, kv_heads or 1, slots]`, slots that no query sees, or None.
        positions: int32 `[pages, kv_heads, page_tokens, 1]`, the position of each token in its row; None: its slot.
        back: int32 `[rows, columns]`: a token at this position or before it is behind the sliding window of that column's query.
        bias: float32 `[rows, kv_heads, R, slots]` that is added to the scores, or None.
    """

    table: Tensor
    used: Tensor
    hidden: Tensor | None = None
    positions: Tensor | None = None
    back: Tensor | None = None
    bias: Tensor | None = None


@dataclass(slots=True)
class Attended:
    """A part of a softmax, float32: the largest score `top`, `mass` = sum exp(score - top) `[rows, kv_heads, R, 1]`, `mixed` =
    sum exp(score - top) v `[rows, kv_heads, R, D]`, and the scores, -inf where hidden, of the rows that were asked for. `ahead
    [rows, kv_heads, R, n]`: scores, without a soft cap, of packed keys behind the slots that are attended, where these were asked
    for. Parts of several runs may wait to be joined: `top`, `mass` and `mixed` have an axis of runs before R then."""

    top: Tensor
    mass: Tensor
    mixed: Tensor
    scores: Tensor | None = None
    ahead: Tensor | None = None

    @property
    def runs(self) -> int:
        """Parts that wait to be joined, 1 for one that is whole."""
        return 1 if self.top.ndim == 4 else self.top.shape[2]
