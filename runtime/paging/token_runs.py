"""Tokens of several rows that follow each other, and the pages that they lie in."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calib.kernels.put_tokens.operation import Put
from calib.kernels.upload import upload
from calib.runtime.device.row_index import row_index


class _InPages(NamedTuple):
    """Where rows of a field are put: page numbers and slots, int64 `[rows]` of each run's first where every run lies in one page;
    else `[rows * count]`, of each."""

    whole: bool
    pages: Tensor
    slots: Tensor


class TokenRuns:
    """A run for each of some rows: `pages` are all page numbers of a row, `first` is the run's first token in them."""

    def __init__(self, pages: list[list[int]], first: Sequence[int]) -> None:
        self.pages, self.first = pages, first
        # For every layer and field that asks the same.
        self._found: dict[tuple[int, int, int, torch.device], _InPages] = {}
        self._indices: dict[tuple[int, int, int, torch.device], slice | Tensor] = {}

    def of_row(self, number: int) -> "TokenRuns":
        """One of them alone."""
        return TokenRuns([self.pages[number]], [self.first[number]])

    def behind(self, tokens: int) -> "TokenRuns":
        """The same from so many tokens on."""
        return TokenRuns(self.pages, [first + tokens for first in self.first]) if tokens else self

    def puts(self, target: Tensor, source: Tensor, row_tokens: int) -> Iterator[Put]:
        """How a field gets there, of which a row is `row_tokens` tokens: `source [rows, kv_heads, n, width]` into pages `target
        [pages, kv_heads, rows of a page, width]`.

        Short runs of several rows go at once, others each in whole pages and the rest.
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
        """Of one row, `source [kv_heads, n, width]`."""
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
