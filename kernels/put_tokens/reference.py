"""Stores new tokens of some rows into tensors of many tokens, in plain torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Put(NamedTuple):
    """A store of t consecutive tokens for each of n rows: `into[pages, :, slots] = tokens[rows, :, 0]`, and the next tokens in the
    slots behind.

    Args:
        into: `[pages, heads, slots, W]`, updated; no slot may occur twice.
        tokens: `[rows, heads, t, W]`, of the same dtype.
        slots: slot of the first token: a number for all rows, or int64 `[n]` with `rows` or `pages`; with pages `[n, heads]` the
            same shape, and t is 1.
        rows: rows of `tokens`, int64 `[n]`; None: all in order.
        pages: index on the first axis of `into`, int64 `[n]`, or `[n, heads]` if heads differ; None: equal to the rows.
    """

    into: Tensor
    tokens: Tensor
    slots: Tensor | int
    rows: Tensor | None = None
    pages: Tensor | None = None


def put_tokens(puts: Sequence[Put]) -> None:
    """Stores the tokens of all `puts`."""
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
