"""What a layer's store is asked in one forward."""

from typing import NamedTuple

from torch import Tensor

from calib.runtime.attend.fetched_tokens import FetchedTokens
from calib.runtime.logits import Logits
from calib.runtime.paging.forward import Forward


class QKV(NamedTuple):
    """What a layer is given in one forward: `query [rows, heads, n, D]`, `keys` and `values [rows, kv_heads, n, D]`."""

    query: Tensor
    keys: Tensor
    values: Tensor

    def of_rows(self, rows: range) -> "QKV":
        """Some rows of it."""
        return QKV(*(part[rows.start : rows.stop] for part in self))

    def of_columns(self, columns: Tensor | slice) -> "QKV":
        """Some columns of it."""
        return QKV(*(part[:, :, columns] for part in self))


class AttendRequest(NamedTuple):
    """Attention of some rows over everything that a store holds of them and what they are given.

    Attributes:
        forward: the forward under way.
        rows: of the batch.
        logits: scale, soft cap and sliding window.
        given: the rows' queries, new keys and new values, without padding.
        observe: whether the store keeps what storing will need of the probabilities.
        fetched: exact tokens that are attended in place of the packed ones.
        normalisers: of a prompt that was attended, see `prompt_normalised`.
    """

    forward: Forward
    rows: range
    logits: Logits
    given: QKV
    observe: bool = False
    fetched: FetchedTokens | None = None
    normalisers: Tensor | None = None
