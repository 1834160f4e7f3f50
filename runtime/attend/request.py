"""The arguments of a store's `attend`."""

from typing import NamedTuple

from torch import Tensor

from calib.runtime.attend.fetched_tokens import FetchedTokens
from calib.runtime.logits import Logits
from calib.runtime.paging.forward import Forward


class QKV(NamedTuple):
    """The new tokens of a layer in one forward: `query [rows, heads, n, D]`, `keys` and `values [rows, kv_heads, n, D]`."""

    query: Tensor
    keys: Tensor
    values: Tensor

    def of_rows(self, rows: range) -> "QKV":
        """The part of some batch rows."""
        return QKV(*(part[rows.start : rows.stop] for part in self))

    def of_columns(self, columns: Tensor | slice) -> "QKV":
        """The part of some columns."""
        return QKV(*(part[:, :, columns] for part in self))


class AttendRequest(NamedTuple):
    """A request for the attention of some rows over all tokens that a store holds for them and their new tokens.

    Attributes:
        forward: the current forward.
        rows: rows of the batch.
        logits: scale, soft cap and sliding window.
        given: the rows' queries, new keys and new values, without padding.
        observe: whether the store records the probabilities that it needs to store the new tokens.
        fetched: exact tokens that are attended instead of their packed copies.
        normalisers: the log-sum-exp of an attended prompt (`prompt_normalised`), if known.
    """

    forward: Forward
    rows: range
    logits: Logits
    given: QKV
    observe: bool = False
    fetched: FetchedTokens | None = None
    normalisers: Tensor | None = None
