"""The fields of a page: the named tensors in which encoded tokens are stored."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.paging.stored_values import StoredValues

Block = Mapping[str, Tensor]


@dataclass(frozen=True)
class Field:
    """One field of encoded tokens: rows of `width` numbers of `dtype` for every KV head, or one row `shared` by all heads."""

    tokens_per_row: int | None  # None: one row for a whole segment
    width: int
    dtype: torch.dtype
    kind: str  # the line of the memory report: one of `memory.KINDS`
    shared: bool = False
    values: StoredValues | None = None  # which values are valid in a file; None: any bits, or any finite numbers

    def row_bytes(self, kv_heads: int) -> int:
        """Bytes of a row, for all KV heads."""
        return self.width * self.dtype.itemsize * (1 if self.shared else kv_heads)

    def bytes_per_token(self, kv_heads: int = 1, segment: int | None = None) -> float:
        """Bytes of one token with `kv_heads` KV heads. A field with one row for a segment counts that row over `segment` tokens."""
        tokens = self.tokens_per_row or segment
        assert tokens, "a number of a whole segment is in no token"
        return self.row_bytes(kv_heads) / tokens
