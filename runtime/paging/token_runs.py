"""Runs of consecutive tokens in several rows, and the pages that they are written to."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calib.kernels.put_tokens.operation import Put
from calib.kernels.upload import upload
from calib.runtime.device.row_index import row_index


class _InPages(NamedTuple):
    """Targets of a field's rows: page numbers and slots int64. If `whole` (every run fits one page) `[rows]`, for the first of
    each run; else `[rows * count]`, for each."""

    whole: bool
    pages: Tensor
    slots: Tensor


class TokenRuns:
    """One run of tokens for each of some rows: `pages` are all page numbers of the row, `first` is the slot of the run's first
    token."""

    def __init__(self, pages: list[list[int]], first: Sequence[int]) -> None:
        self.pages, self.first = pages, first
        # Shared by all layers and fields of the same shape.
        self._found: dict[tuple[int, int, int, torch.device], _InPages] = {}
        self._indices: dict[tuple[int, int, int, torch.device], slice | Tensor] = {}

    def of_row(self, number: int) -> "TokenRuns":
        """The run of one row alone."""
        return TokenRuns([self.pages[number]], [self.first[number]])

    def behind(self, tokens: int) -> "TokenRuns":
        """The same runs without their first `tokens` tokens."""
        return TokenRuns(self.pages, [first + tokens for first in self.first]) if tokens else self

    def puts(self, target: Tensor, source: Tensor, row_tokens: int) -> Iterator[Put]:
        """Returns the writes of a field in which a row covers `row_tokens` tokens: `source [rows, kv_heads, n, width]` into
        pages `target [pages, kv_heads, rows of a page, width]`.

        Short runs of several batch rows are written at once; longer ones row by row, whole pages first.
        """
        count, page_rows = source.shape[2], target.shape[2]
        if len(self.pages) == 1 or count >= 2 * page_rows:
            for row, own in enumerate(source):
                yield from self._by_pages(target, own, row, row_tokens)
            return
        key = (page_rows, row_tokens, count, target.device)
        if key not in self._found:
            self._found[key] = self._in_pages(*key)
        whole, pages, slots = self._found[key]
        yield Put(target, source if whole else source.transpose(1, 2).flatten(0, 1)[:, :, None], slots, pages=pages)

    def _in_pages(self, page_rows: int, row_tokens: int, count: int, device: torch.device) -> _InPages:
        runs = [(pages, first // row_tokens) for pages, first in zip(self.pages, self.first, strict=True)]
        whole = all(at % page_rows + count <= page_rows for _, at in runs)
        each = [(pages, at + i) for pages, at in runs for i in range(1 if whole else count)]
        pages, slots = ([own[at // page_rows] for own, at in each], [at % page_rows for _, at in each])
        return _InPages(whole, *(upload(part, torch.int64, device) for part in (pages, slots)))

    def _by_pages(self, target: Tensor, source: Tensor, row: int, row_tokens: int) -> Iterator[Put]:
        """The writes of one batch row, `source [kv_heads, n, width]`: whole pages together, partial pages one by one."""
        pages, page_rows, total = self.pages[row], target.shape[2], source.shape[1]
        at, done = self.first[row] // row_tokens, 0
        while done < total:
            page, slot = divmod(at + done, page_rows)
            whole = (total - done) // page_rows if slot == 0 else 0
            count = whole * page_rows if whole > 1 else min(page_rows - slot, total - done)
            parts = source[:, done : done + count].unflatten(1, (max(1, whole), -1)).transpose(0, 1)
            done += count
            if whole <= 1:
                yield Put(target[pages[page] : pages[page] + 1], parts, slot)
                continue
            key = (row, page, whole, target.device)
            if key not in self._indices:
                self._indices[key] = row_index(pages[page : page + whole], target.device)
            index = self._indices[key]
            yield Put(target[index], parts, 0) if isinstance(index, slice) else Put(target, parts, 0, pages=index)
