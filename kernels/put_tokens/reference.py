"""One new token of some rows into tensors that hold many, in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Put:
    """One token each of n rows, and where it belongs: `into[places, :, slots] = tokens[rows, :, 0]`.

    Args:
        into: `[places, heads, slots, W]`, changed; no slot twice.
        tokens: `[rows, heads, 1, W]`, of the same dtype.
        slots: one for all rows, or with `rows` or `places` int64 `[n]`; with places `[n, heads]` the same shape.
        rows: int64 `[n]`; None: all of `tokens` in their order.
        places: int64 `[n]`, or `[n, heads]` where heads differ; None: the rows' own numbers.
    """

    into: Tensor
    tokens: Tensor
    slots: Tensor | int
    rows: Tensor | None = None
    places: Tensor | None = None


def put_tokens(puts: Sequence[Put]) -> None:
    """Puts all tokens."""
    for put in puts:
        rows: Any = slice(None) if put.rows is None else put.rows
        places: Any = rows if put.places is None else put.places
        heads: Any = slice(None)
        if put.places is not None and put.places.ndim == 2:
            heads = torch.arange(put.into.shape[1], device=put.into.device)
        put.into[places, heads, put.slots] = put.tokens[rows, :, 0]
