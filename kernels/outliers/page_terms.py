"""Data class of what pages store besides codes: outliers and, where every page has its own basis, low-rank coefficients (GEAR)."""

from dataclasses import dataclass

from torch import Tensor

from calib.kernels.outliers.row_lists import RowLists


@dataclass(frozen=True)
class PageTerms:
    """Outliers and low-rank coefficients of one stream (keys or values). 16-bit indices are unsigned. No entry occurs twice, except
    unused ones with delta 0, which add nothing.

    Args:
        delta: what each outlier adds to the decoded element, float16 or float32: `[pages, kv_heads or 1, page_tokens, n]`, n per
            token; if `listed`, `[pages, kv_heads, 1, n D]`, n per channel, channels changing fastest. None: no outliers.
        index: channel of each outlier, of the same shape; if `listed`, its token in the page: within a channel tokens rise, and
            unused entries (token 0, delta 0) come last (`reference.in_order`).
        listed: whether outliers are stored per page and channel, not per token.
        across: whether a channel index counts the channels of all heads; outliers per token are then `[pages, 1, ...]`.
        lists: outliers of rows' whole segments; then the other fields are unused. (A low-rank basis that all tokens of a row share
            is in `PackedStream.ranked`.)
        coefficients: float16 or float32 `[pages, kv_heads or 1, page_tokens, r]`, or None.
        basis: vectors of the coefficients for each page, `[pages, kv_heads, 1, r D]`.
    """

    delta: Tensor | None = None
    index: Tensor | None = None
    listed: bool = False
    across: bool = False
    lists: RowLists | None = None
    coefficients: Tensor | None = None
    basis: Tensor | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether there are any terms."""
        return self.delta is not None or self.coefficients is not None or self.lists is not None

    @property
    def rank(self) -> int:
        """Number of low-rank coefficients of a token."""
        return 0 if self.coefficients is None else self.coefficients.shape[-1]
