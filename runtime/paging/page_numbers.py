"""The page numbers of each row, on the host and as tensors on the devices that read pages. The tensors are shared by all layers
and uploaded again only when a row's pages have changed."""

from typing import TypeAlias

import torch
from torch import Tensor

from calib.kernels.upload import upload

PAGE_TOKENS = 128

# The decode steps of a block read the same number of pages, some of which rows do not have yet: at most for this many more
# tokens, or this share of a row's pages.
ROOM_TOKENS, ROOM_SHARE = 2 * PAGE_TOKENS, 32

# In a row's list: no page, because it was freed or never needed, behind a sliding window.
EMPTY = -1

# Pages to read: their numbers int32 `[rows, n]`, or a slice for one row whose pages have consecutive numbers.
Pages: TypeAlias = Tensor | slice


class PageNumbers:
    """`rows` has each row's page numbers, `EMPTY` where it has no page. Pages have `page_tokens` slots."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.rows: list[list[int]] = []
        self._tensors: dict[torch.device, Tensor] = {}
        self._with_room: dict[torch.device, Tensor] = {}
        self._renewed: set[torch.device] = set()  # devices whose `_with_room` is up to date
        self._selected: dict[tuple[range, int, int, torch.device], Pages] = {}
        self._first: dict[tuple[range, torch.device], Pages] = {}

    @property
    def longest(self) -> int:
        """The number of pages in the longest row."""
        return max(map(len, self.rows), default=0)

    def with_room(self, pages: int) -> int:
        """How many pages decode steps read of a row that has `pages`: the next multiple of a power of 2, `ROOM_TOKENS` or a
        `ROOM_SHARE`-th of the pages. Steps have the same shapes as long as these suffice."""
        step = 1 << max(1, ROOM_TOKENS // self.page_tokens, pages // ROOM_SHARE).bit_length() >> 1
        return -(-pages // step) * step

    def pages(self, row: int, start: int, count: int) -> list[int]:
        """`count` page numbers of `row` from index `start` on, 0 where it has no page: those slots are masked."""
        held = [max(page, 0) for page in self.rows[row][start : start + count]]
        return held + [0] * (count - len(held))

    def numbers(self, device: torch.device) -> Tensor:
        """int32 `[rows, pages of the longest row]`, 0 where a row has no page; uploaded again only after rows' pages changed."""
        if device not in self._tensors:
            longest = self.longest
            padded = [self.pages(row, 0, longest) for row in range(len(self.rows))]
            self._tensors[device] = upload(padded, torch.int32, device).view(len(self.rows), longest)
        return self._tensors[device]

    def numbers_with_room(self, device: torch.device) -> Tensor:
        """The same for `with_room` pages a row. The tensor keeps its address while rows need no more pages; `renew` updates it."""
        if device not in self._renewed:
            self._renew(device)
        return self._with_room[device]

    def renew(self) -> None:
        """Updates the tensors of `numbers_with_room` in place, for a replayed graph, which reads them without a call."""
        for device, held in self._with_room.items():
            if device not in self._renewed and held.shape == self._shape_with_room():
                self._renew(device)

    def select(self, rows: range, start: int, stop: int, device: torch.device, room: bool = False) -> Pages:
        """The pages with indices [start, stop) in the lists of `rows`, for `PagePool.read`; with `room` from
        `numbers_with_room`."""
        if room:
            return self.numbers_with_room(device)[rows.start : rows.stop, start:stop]
        key = (rows, start, stop, device)
        if key not in self._selected:
            self._selected[key] = self._select(*key)
        return self._selected[key]

    def select_first(self, rows: range, device: torch.device) -> Pages:
        """The first page of each of `rows`: a slice where their numbers are consecutive, else a tensor `[rows, 1]`."""
        key = (rows, device)
        if key not in self._first:
            held = [self.pages(row, 0, 1)[0] for row in rows]
            follow = held == list(range(held[0], held[0] + len(held)))
            numbers = None if follow else self.numbers(device)[rows.start : rows.stop, :1]
            self._first[key] = slice(held[0], held[0] + len(held)) if numbers is None else numbers
        return self._first[key]

    def predicted_bytes(self) -> int:
        """Bytes of the copies on devices: 4 for each page number."""
        copies = len(self._tensors) * len(self.rows) * self.longest
        return 4 * (copies + sum(numbers.numel() for numbers in self._with_room.values()))

    def _renew(self, device: torch.device) -> None:
        rows, longest = self._shape_with_room()
        found = upload([self.pages(row, 0, longest) for row in range(rows)], torch.int32, device).view(rows, longest)
        held = self._with_room.get(device)
        if held is not None and held.shape == found.shape:
            held.copy_(found)
        else:
            self._with_room[device] = found
        self._renewed.add(device)

    def _shape_with_room(self) -> tuple[int, int]:
        return len(self.rows), self.with_room(self.longest)

    def _select(self, rows: range, start: int, stop: int, device: torch.device) -> Pages:
        if len(rows) == 1:
            held = self.pages(rows.start, start, stop - start)
            if held == list(range(held[0], held[0] + stop - start)):
                return slice(held[0], held[0] + stop - start)
        return self.numbers(device)[rows.start : rows.stop, start:stop]

    def _outdated(self) -> None:
        """Discards the copies, because rows have other pages now."""
        self._renewed.clear()
        self._tensors.clear()
        self._selected.clear()
        self._first.clear()
