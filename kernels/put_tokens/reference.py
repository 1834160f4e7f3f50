"""New tokens of some rows into tensors that hold many, in plain torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Put(NamedTuple):
    """A token or several of n rows each, and where they belong: `into[pages, :, slots] = tokens[rows, :, 0]`, and the next ones
    behind it.

    Args:
        into: `[pages, heads, slots, W]`, changed; no slot twice.
        tokens: `[rows, heads, t, W]`, of the same dtype.
        slots: of the first token: one for all rows, or with `rows` or `pages` int64 `[n]`; with pages `[n, heads]` the same shape,
            where t is 1.
        rows: int64 `[n]`; None: all of `tokens` in their order.
        pages: int64 `[n]`, or `[n, heads]` where heads differ: numbers on the first axis, of pages; None: of the rows themselves.
    """

    into: Tensor
    tokens: Tensor
    slots: Tensor | int
    rows: Tensor | None = None
    pages: Tensor | None = None


def put_tokens(puts: Sequence[Put]) -> None:
    """Puts all tokens."""
    for put in puts:
        rows: Any = slice(None) if put.rows is None else put.rows
        pages: Any = rows if put.pages is None else put.pages
        heads: Any = slice(None)
        if put.pages is not None and put.pages.ndim == 2:
            heads = torch.arange(put.into.shape[1], device=put.into.device)
        together = put.tokens.shape[2]
        if together > 1 and isinstance(put.slots, int):
            put.into[:, :, put.slots : put.slots + together][pages] = put.tokens[rows]
        elif together > 1 and isinstance(put.slots, Tensor):
            slots = put.slots[:, None] + torch.arange(together, device=put.into.device)
            put.into[pages[:, None], :, slots] = put.tokens[rows].transpose(1, 2)
        else:
            put.into[pages, heads, put.slots] = put.tokens[rows, :, 0]
