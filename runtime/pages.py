"""Pages: where encoded tokens live, and the table that says which page holds which tokens of which row.

A page is `PAGE_TOKENS` token slots of one layer, for all its KV heads: token t of a row lies in the row's page
t // PAGE_TOKENS, slot t % PAGE_TOKENS, in the fields of both streams. All layers of a cache encode in step, so one
`PageTable` (row -> page numbers) serves every layer's `PagePool` (page number -> tensors). Rows may share a page (beams);
whoever writes to a shared page gets a copy of its own first. Where every layer slides, pages that the window has left
behind are given back.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.runtime.stages.contract import Block, Field

PAGE_TOKENS = 128

# A row that is divided into tiers leaves as many last pages half empty: their pages are smaller.
TIER_PAGE_TOKENS = 64

# The most tokens that are ever in float32 at once while a long prompt is encoded or pages are attended, and the most
# elements of a stream: a tile that stays in the processor's own cache is read several times for the price of once.
TILE_TOKENS = 4096
TILE_ELEMENTS = 2**20

# A pool that is full grows by a sixteenth: the copy that this costs comes once in T/16 tokens and is paid for by the
# T/16 attention passes between, and no more than a sixteenth of the pages are ever slack.
GROWTH = 16


# In a row's list, a page that was given back or never needed, behind a sliding window.
NOWHERE = -1

# Pages to read: their numbers int32 `[rows, n]`, or a slice for one row whose pages follow each other.
Pages: TypeAlias = Tensor | slice


def tile_tokens(kv_heads: int, head_dim: int) -> int:
    """Tokens of all rows together in one tile of a layer."""
    return max(PAGE_TOKENS, min(TILE_TOKENS, TILE_ELEMENTS // (kv_heads * head_dim)))


class PageTable:
    """Host-side bookkeeping: each row's page numbers, how many rows hold each page, and the pool's capacity."""

    def __init__(self, page_tokens: int = PAGE_TOKENS) -> None:
        self.page_tokens = page_tokens
        self.rows: list[list[int]] = []
        self.capacity = 0
        self._holders: list[int] = []
        self._free: list[int] = []
        self._tensors: dict[torch.device, Tensor] = {}
        self._selected: dict[tuple[range, int, int, torch.device], Pages] = {}
        self._released: dict[int, int] = {}  # positions of a row that `release` is done with

    def reserve(self, row: int, pages: int, writes: Iterable[int], first: int = 0) -> list[tuple[int, int]]:
        """Gives `row` pages up to position `pages` and makes those it `writes` (positions in the row) its own.

        Positions before `first` that it does not have yet stay empty. Returns the (from, to) page numbers whose content
        must be copied before the row writes.
        """
        held, copies = self.rows[row], []
        for position in writes:
            if position < len(held) and self._holders[held[position]] > 1:
                own = self._take()
                self._holders[held[position]] -= 1
                copies.append((held[position], own))
                held[position] = own
        while len(held) < pages:
            held.append(self._take() if len(held) >= first else NOWHERE)
        return copies

    def release(self, row: int, first: int) -> None:
        """Gives back the pages of `row` before position `first`, which nobody reads any more."""
        held = self.rows[row]
        stop = min(first, len(held))
        # From where the last release ended: a row may hold pages before some that it never needed.
        for position in range(self._released.get(row, 0), stop):
            if held[position] != NOWHERE:
                self._let_go(held[position])
                held[position] = NOWHERE
                self._changed()
        self._released[row] = max(stop, self._released.get(row, 0))

    def prepare(self, needed: int) -> None:
        """Grows the capacity so that `needed` pages can be taken."""
        missing = needed - len(self._free)
        if missing > 0:
            grown = self.capacity + max(missing, self.capacity // GROWTH)
            self._free.extend(range(grown - 1, self.capacity - 1, -1))
            self._holders.extend([0] * (grown - self.capacity))
            self.capacity = grown

    def place(self, row: int, token: int) -> tuple[int, int]:
        """(page number, slot) of a token of a row."""
        return self.rows[row][token // self.page_tokens], token % self.page_tokens

    def pages(self, row: int, start: int, count: int) -> list[int]:
        """`count` page numbers of `row` from position `start` on, 0 where it holds none: what is there is masked."""
        held = [max(page, 0) for page in self.rows[row][start : start + count]]
        return held + [0] * (count - len(held))

    def select(self, rows: range, start: int, stop: int, device: torch.device) -> Pages:
        """The pages at positions [start, stop) of `rows`, as `PagePool.read` takes them."""
        key = (rows, start, stop, device)
        if key not in self._selected:
            self._selected[key] = self._select(*key)
        return self._selected[key]

    def permute(self, sources: list[int]) -> list[int] | None:
        """Row i becomes a copy of row `sources[i]`: pages are shared, none is moved (beams, repeats, selections).

        Where this frees more pages than stay in use, the pages that stay are numbered anew: then returns their old
        numbers in the new order, for `PagePool.keep`.
        """
        old, self.rows = self.rows, [list(self.rows[source]) for source in sources]
        self._released = {row: self._released.get(source, 0) for row, source in enumerate(sources)}
        for page in (page for row in self.rows for page in row if page != NOWHERE):
            self._holders[page] += 1
        for page in (page for row in old for page in row if page != NOWHERE):
            self._let_go(page)
        self._changed()
        return self._compact() if 2 * len(self._free) > self.capacity else None

    def numbers(self, device: torch.device) -> Tensor:
        """int32 `[rows, most pages of a row]`, 0 where a row holds none; rebuilt only when a row's pages changed."""
        if device not in self._tensors:
            longest = max(map(len, self.rows), default=0)
            padded = [self.pages(row, 0, longest) for row in range(len(self.rows))]
            self._tensors[device] = upload(padded, torch.int32, device).view(len(self.rows), longest)
        return self._tensors[device]

    def predicted_bytes(self) -> int:
        """Bytes of the table's copies on devices: 4 a page number."""
        return 4 * len(self._tensors) * len(self.rows) * max(map(len, self.rows), default=0)

    def leave_devices(self) -> None:
        """Drops the copies on devices; the next forward makes them where it runs."""
        self._changed()

    def _select(self, rows: range, start: int, stop: int, device: torch.device) -> Pages:
        if len(rows) == 1:
            held = self.pages(rows.start, start, stop - start)
            if held == list(range(held[0], held[0] + stop - start)):
                return slice(held[0], held[0] + stop - start)
        return self.numbers(device)[rows.start : rows.stop, start:stop]

    def _compact(self) -> list[int]:
        kept = list(dict.fromkeys(page for row in self.rows for page in row if page != NOWHERE))
        number = {NOWHERE: NOWHERE} | {old: new for new, old in enumerate(kept)}
        self.rows = [[number[page] for page in row] for row in self.rows]
        self._holders = [self._holders[page] for page in kept]
        self._free, self.capacity = [], len(kept)
        return kept

    def _take(self) -> int:
        self.prepare(1)
        page = self._free.pop()
        self._holders[page] = 1
        self._changed()
        return page

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def _changed(self) -> None:
        self._tensors.clear()
        self._selected.clear()


class PagePool:
    """One layer's pages: for each field of a stream a tensor `[pages, kv_heads, page_tokens / tokens_per_row, width]`, where
    heads share it `[pages, 1, ...]`. What a whole segment shares is one row of its page: a page is then no more than a segment.
    """

    def __init__(
        self, fields: dict[str, Field], kv_heads: int, device: torch.device, page_tokens: int = PAGE_TOKENS
    ) -> None:
        self.page_tokens, self.kv_heads, self.device = page_tokens, kv_heads, device
        self.capacity = 0
        self.fields: dict[str, Field] = {}
        self.tensors: dict[str, Tensor] = {}
        self.fit(fields)

    def fit(self, fields: dict[str, Field]) -> None:
        """Makes room for the same fields with wider rows or larger indices; what is there stays, followed by zeros."""
        for name, field in fields.items():
            if field == self.fields.get(name):
                continue
            rows, heads = self.page_tokens // self.rows_of(field), 1 if field.shared else self.kv_heads
            new = torch.zeros(self.capacity, heads, rows, field.width, dtype=field.dtype, device=self.device)
            if name in self.tensors and self.capacity:
                old = self.tensors[name]
                # Indices in 16 bits have no sign.
                old = old.int() & 0xFFFF if (old.dtype, field.dtype) == (torch.int16, torch.int32) else old
                new[..., : old.shape[-1]] = old
            self.tensors[name] = new
        self.fields = fields

    def rows_of(self, field: Field) -> int:
        """Tokens of a row of `field`."""
        return field.tokens_per_row or self.page_tokens

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` pages. New pages are zero: a slot nobody wrote must still be finite."""
        if capacity == self.capacity:
            return
        for name, old in self.tensors.items():
            new = old.new_zeros(capacity, *old.shape[1:])
            new[: self.capacity] = old
            self.tensors[name] = new
        self.capacity = capacity

    def to(self, device: torch.device) -> None:
        """Moves every page."""
        self.device = device
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    def bytes_by_kind(self, capacity: int) -> Counter[str]:
        """Bytes of so many pages, from shapes."""
        found: Counter[str] = Counter()
        for field in self.fields.values():
            found[field.kind] += capacity * (self.page_tokens // self.rows_of(field)) * field.row_bytes(self.kv_heads)
        return found

    def bytes_per_token(self) -> float:
        """Bytes of one more token, for all KV heads."""
        return sum(field.bytes_per_token(self.kv_heads, self.page_tokens) for field in self.fields.values())

    def keep(self, pages: list[int]) -> None:
        """Keeps these pages alone, in this order."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor[upload(pages, torch.int64, tensor.device)]
        self.capacity = len(pages)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole pages, (from, to) each."""
        for tensor in self.tensors.values():
            for source, target in pairs:
                tensor[target] = tensor[source]

    def read(self, pages: Pages, part: str = "") -> Block:
        """Pages by number -> tile of fields `[rows, kv_heads, width, n * page_tokens / tokens_per_row]`, still packed.

        `pages` is int32 `[rows, n]`, or for one row whose pages follow each other their slice, which saves a copy. Of a
        pool that holds several parts ("keys.words") only the fields of `part` ("keys.") are read, under their own names.
        """
        tile = {}
        for full_name, tensor in self.tensors.items():
            if not full_name.startswith(part):
                continue
            name = full_name.removeprefix(part)
            block = (
                tensor[pages].unsqueeze(0) if isinstance(pages, slice) else tensor[pages]
            )  # [rows, n, heads, slots, w]
            if self.fields[full_name].kind == "exact":
                # Nothing to unpack, so the product may as well read tokens first: a token's channels are copied as one run.
                tile[name] = block.transpose(1, 2).flatten(2, 3).mT
            else:
                tile[name] = block.permute(0, 2, 4, 1, 3).flatten(3)
        return tile

    def write_run(self, pages: list[int], start: int, block: Block) -> None:
        """Writes a row's consecutive tokens, the first at token `start` of the row whose page numbers are `pages`.

        `block` fields are `[kv_heads, tokens / tokens_per_row, width or less]`; others than the pool's are left alone.
        """
        for name, field in self.fields.items():
            target = self.tensors[name]
            source = block[name].to(target.dtype)  # exact tokens come in float32, indices in int32
            source = F.pad(source, (0, target.shape[-1] - source.shape[-1]))  # a segment that is not the longest
            row_tokens = self.rows_of(field)
            page_rows = self.page_tokens // row_tokens
            at, done, total = start // row_tokens, 0, source.shape[-2]
            while done < total:
                page, slot = divmod(at + done, page_rows)
                count = min(page_rows - slot, total - done)
                whole = (total - done) // page_rows
                if whole > 1 and slot == 0:
                    count = whole * page_rows
                    parts = source[:, done : done + count].unflatten(1, (whole, page_rows)).transpose(0, 1)
                    target[upload(pages[page : page + whole], torch.int64, target.device)] = parts
                else:
                    target[pages[page], :, slot : slot + count] = source[:, done : done + count]
                done += count

    def write_tokens(self, pages: Tensor, slots: Tensor, block: Block) -> None:
        """Writes one token for each of n rows: page number and slot int64 `[n]`, fields `[n, kv_heads, 1, width]`.

        Slots that differ by head, and their pages, are int64 `[n, kv_heads]`.
        """
        for name, tensor in self.tensors.items():
            if slots.ndim == 2:
                tensor[pages, self._heads(tensor), slots] = block[name][:, :, 0].to(tensor.dtype)
            else:
                tensor[pages, :, slots] = block[name][:, :, 0].to(tensor.dtype)

    def read_tokens(self, pages: Tensor, slots: Tensor) -> Block:
        """One token for each of n rows and each head: page number and slot int64 `[n, kv_heads]` -> `[n, kv_heads, 1, width]`."""
        return {name: tensor[pages, self._heads(tensor), slots][:, :, None] for name, tensor in self.tensors.items()}

    def _heads(self, tensor: Tensor) -> Tensor:
        return torch.arange(self.kv_heads, device=tensor.device)


def upload(
    numbers: list[int] | list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A small host list on the device, without waiting for the device."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
