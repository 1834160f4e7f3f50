"""Splits a forward into chunks that are attended and stored one after the other, as if each were a forward of its own (InfLLM,
arXiv:2402.04617, section 3.1).

A row's chunks are counted from its first real token in the forward, so that neither padding nor other rows shift them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward


@dataclass(frozen=True)
class EncodingChunk:
    """One chunk: its `forward`, and the `columns` of the whole forward in it, one slice for all rows or int64 `[tokens]` of
    each.

    It has no padding between tokens: each row's tokens begin at column 0, and columns after the tokens of shorter rows are
    unused.
    """

    forward: Forward
    columns: slice | list[Tensor]

    def of(self, whole: Tensor) -> Tensor:
        """The chunk's part of `whole [rows, heads, columns of the whole forward, D]`: `[rows, heads, width of the chunk, D]`."""
        if isinstance(self.columns, slice):
            return whole[:, :, self.columns]
        part = whole.new_zeros(*whole.shape[:2], self.forward.width, whole.shape[3])
        for row, columns in enumerate(self.columns):
            part[row, :, : len(columns)] = whole[row, :, columns.to(whole.device)]
        return part

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes `part` back into `whole`, in place: the reverse of `of`."""
        if isinstance(self.columns, slice):
            whole[:, :, self.columns] = part
            return
        for row, columns in enumerate(self.columns):
            whole[row, :, columns.to(whole.device)] = part[row, :, : len(columns)]


def encoding_chunks(forward: Forward, size: int) -> Iterator[EncodingChunk]:
    """The chunks of up to `size` real tokens of each row, for one layer. Pages are reserved already. What a chunk's `Forward`
    caches is dropped with it and not shared by layers, unlike a whole forward's."""
    for start in range(0, max(forward.counts), size):
        counts = [min(size, max(0, count - start)) for count in forward.counts]
        before = [held + min(start, count) for held, count in zip(forward.before, forward.counts, strict=True)]
        width, columns, own = max(counts), slice(start, start + size), None
        chunk_columns: slice | list[Tensor] = columns
        if forward.columns is not None:
            chunk_columns = [real[columns] for real in forward.columns]
            if min(counts) < width:
                own = [torch.arange(count, device=forward.columns[0].device) for count in counts]
        chunk = Forward(before, counts, own, width, pending=1)
        host = forward.host_forward
        if host is not None:
            chunk.host_forward = Forward(before, counts, own, width, pending=1, oldest=host.oldest)
        chunk.oldest = forward.oldest
        yield EncodingChunk(chunk, chunk_columns)
