"""What tokens in pages are beside their codes: outliers and, where every page has vectors of its own, coefficients of these."""

from dataclasses import dataclass

from torch import Tensor

from calib.kernels.outliers.row_lists import RowLists


@dataclass(frozen=True)
class PageTerms:
    """One stream's, as they lie. Indices of 16 bits have no sign; of entries none repeats but those of a distance of 0, which
    add nothing.

    Args:
        delta: distances of outliers in pages, float16 or float32: `[pages, kv_heads or 1, page_tokens, n]`, n for each token; of
            `listed` ones `[pages, kv_heads, 1, n D]`, n for each channel, channels running fastest. None: there are none.
        index: of the same shape, the channel of each; of listed ones the token in its page. Of a channel's entries tokens rise,
            and unused ones (token 0, distance 0) come last (`reference.in_order`).
        listed: whether outliers are lists of a page, not some for each token.
        across: whether a channel is one of all heads', and tokens' outliers are `[pages, 1, ...]`.
        lists: outliers of rows' segments; then there is nothing else, but for vectors that all tokens of a row share.
        coefficients: of each token, float16 or float32 `[pages, kv_heads or 1, page_tokens, r]`, or None.
        basis: of each page the vectors that they are of, `[pages, kv_heads, 1, r D]`.
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
        """Whether tokens have any terms here."""
        return self.delta is not None or self.coefficients is not None or self.lists is not None

    @property
    def rank(self) -> int:
        """Coefficients of a token."""
        return 0 if self.coefficients is None else self.coefficients.shape[-1]
