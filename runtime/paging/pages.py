"""Pages of encoded tokens, and the table that says which page holds which tokens of which row.

A page is up to `PAGE_TOKENS` token slots of one layer, for all its KV heads: token t of a row lies in the row's page
t // page_tokens, slot t % page_tokens, in the fields of both streams. All layers of a cache encode in step, so one
`PageTable` (row -> page numbers) serves every layer's `PagePool` (page number -> tensors, `pool.py`). Rows may share a page
(beams); a row that writes to a shared page gets its own copy first. Where every layer has a sliding window, pages older than
the window are freed.

A table may be `fitted`: while no row needs more than one page, pages have no more slots than the longest row (rounded up), so
that a short prompt does not take memory for 128 tokens.
"""

from collections.abc import Iterable, Sequence

from calib.runtime.files.state import State, StateError, part_of, whole, wholes
from calib.runtime.messages.printable import printable
from calib.runtime.paging.page_numbers import EMPTY, PAGE_TOKENS, PageNumbers
from calib.runtime.paging.token_runs import TokenRuns

# Pages of tiers are smaller, because every tier of a row has a partly filled last page.
TIER_PAGE_TOKENS = 64

# The most tokens that are in float32 at once while a long prompt is encoded or pages are attended, and the most elements of
# keys or values: a tile that fits the processor's cache is read several times for the cost of once.
TILE_TOKENS = 4096
TILE_ELEMENTS = 2**20

# The slots of a fitted page are a multiple of this: what a kernel reads in one iteration.
SLOT_STEP = 16

# A full pool grows by a sixteenth: that copy is made once in T/16 tokens, which amortises it over T/16 attention passes, and at
# most a sixteenth of the pages is unused.
GROWTH = 16

# A pool in host memory is copied over the bus in both directions, so it grows by a quarter.
HOST_GROWTH = 4


def tile_tokens(kv_heads: int, head_dim: int) -> int:
    """How many tokens of all rows together one tile of a layer has, at least `PAGE_TOKENS`."""
    return max(PAGE_TOKENS, min(TILE_TOKENS, TILE_ELEMENTS // (kv_heads * head_dim)))


class PageTable(PageNumbers):
    """The host's record of each row's page numbers, of how many rows share each page, and of the pool's capacity in pages."""

    def __init__(self, page_tokens: int = PAGE_TOKENS, growth: int = GROWTH, fitted: bool = False) -> None:
        """`page_tokens` are the slots of a page. If `fitted`, they are the most, and pages begin with `SLOT_STEP`. A full pool
        grows by one `growth`-th."""
        super().__init__(SLOT_STEP if fitted else page_tokens)
        self.most, self.fitted, self.growth = page_tokens, fitted, growth
        self.capacity = 0
        self.version = 0  # counts changes of any row's pages
        self.moves = 0  # counts those other than one more page at a row's end
        self._holders: list[int] = []
        self._free: list[int] = []
        self._shares: bool | None = None  # `shares`, None until it is asked for again
        self._released: dict[int, int] = {}  # by row: indices before this one are released already

    def fit(self, tokens: int) -> None:
        """Makes pages long enough for a row of `tokens`, before the row has them; rows that grow step by step double them."""
        if tokens <= self.page_tokens or self.page_tokens == self.most:
            return
        wanted = -(-tokens // SLOT_STEP) * SLOT_STEP
        grown = 2 * self.page_tokens if any(self.rows) else 0
        self.page_tokens = min(self.most, max(wanted, grown))
        self._changed()

    def reserve(self, row: int, pages: int, writes: Iterable[int], first: int = 0) -> list[tuple[int, int]]:
        """Gives `row` pages up to index `pages`, and copies of its own of the shared pages at the indices `writes`.

        Indices before `first` that it does not have yet stay empty. Returns the (from, to) page numbers whose content
        must be copied before the row writes.
        """
        held, copies = self.rows[row], []
        for position in writes:
            if position < len(held) and self._holders[held[position]] > 1:
                own = self._take()
                self._holders[held[position]] -= 1
                copies.append((held[position], own))
                held[position] = own
                self._changed()
        while len(held) < pages:
            held.append(self._take() if len(held) >= first else EMPTY)
        return copies

    def release(self, row: int, first: int) -> None:
        """Frees the pages of `row` before index `first`, which no later forward reads."""
        held = self.rows[row]
        stop = min(first, len(held))
        # From the end of the last release on: before entries that are EMPTY from the start, a row may hold pages to free.
        for position in range(self._released.get(row, 0), stop):
            if held[position] != EMPTY:
                self._let_go(held[position])
                held[position] = EMPTY
                self._changed()
        self._released[row] = max(stop, self._released.get(row, 0))

    @property
    def shares(self) -> bool:
        """Whether any page is held by several rows."""
        if self._shares is None:
            self._shares = max(self._holders, default=0) > 1
        return self._shares

    def prepare(self, needed: int, wanted: int = 0) -> None:
        """Grows the capacity so that `needed` pages are free; where it must grow, `wanted` ones if these are more."""
        missing = needed - len(self._free)
        if missing > 0:
            grown = self.capacity + max(missing, wanted - len(self._free), self.capacity // self.growth)
            self._free.extend(range(grown - 1, self.capacity - 1, -1))
            self._holders.extend([0] * (grown - self.capacity))
            self.capacity = grown

    def location(self, row: int, token: int) -> tuple[int, int]:
        """(page number, slot) of a token of a row."""
        return self.rows[row][token // self.page_tokens], token % self.page_tokens

    def runs(self, rows: list[int], first: int | Sequence[int]) -> TokenRuns:
        """The tokens of `rows` from slot `first` on, one number for all rows or one for each."""
        return TokenRuns([self.rows[row] for row in rows], [first] * len(rows) if isinstance(first, int) else first)

    def permute(self, sources: list[int]) -> list[int] | None:
        """Row i becomes a copy of row `sources[i]`: rows share pages, nothing is moved (beams, repeats, selections).

        Where more pages are then free than in use, the used ones are renumbered. Then returns their old numbers in the new
        order, for `PagePool.keep`; else None.
        """
        old, self.rows = self.rows, [list(self.rows[source]) for source in sources]
        self._released = {row: self._released.get(source, 0) for row, source in enumerate(sources)}
        for page in (page for row in self.rows for page in row if page != EMPTY):
            self._holders[page] += 1
        for page in (page for row in old for page in row if page != EMPTY):
            self._let_go(page)
        self._changed()
        return self._compact() if 2 * len(self._free) > self.capacity else None

    def state(self) -> State:
        """Each row's page numbers, the capacity, and the slots of a page where the table is fitted."""
        fitted: State = {"page_tokens": self.page_tokens} if self.fitted else {}
        return {"capacity": self.capacity, "rows": self.rows} | fitted

    def restore_page_tokens(self, state: State) -> None:
        """Sets the slots of a page from `state`, before `restore`: the pages that a row needs depend on them. Default: full
        pages."""
        slots = whole({"page_tokens": self.most} | state, "page_tokens")
        if slots != self.most and not (self.fitted and slots in range(SLOT_STEP, self.most, SLOT_STEP)):
            raise StateError(f"pages of {slots} tokens, expected {self.most}")
        self.page_tokens = slots

    def restore(self, state: State, needed: list[tuple[int, int]], most: int) -> None:
        """Fills the table from `state`, as `state()` returned it; which pages are free or shared follows from the rows.

        `needed` has for each row the number of its pages and the index before which pages may be missing. No table may have
        more than `most` pages, so that a small file cannot make long lists. Raises StateError where the numbers do not fit.
        """
        capacity, held = whole(state, "capacity"), part_of(state, "rows", list)
        if capacity > most:
            raise StateError(f"'capacity' is {capacity}, expected {most} pages at most, as tensors have")
        if len(held) != len(needed):
            raise StateError(f"pages of {len(held)} rows, expected {len(needed)}")
        held = [wholes({"pages": pages}, "pages", least=EMPTY) for pages in held]
        if max((page for pages in held for page in pages), default=EMPTY) >= capacity:
            raise StateError(f"page numbers beyond the capacity of {capacity} pages")
        if self.page_tokens != self.most and max((count for count, _ in needed), default=0) > 1:
            raise StateError(f"pages of {self.page_tokens} tokens where a row has several, expected {self.most}")
        found: dict[int, int] = {}  # a shared page has the same index in all its rows
        for row, (pages, (count, first)) in enumerate(zip(held, needed, strict=True)):
            if len(pages) != count or EMPTY in pages[first:]:
                raise StateError(f"row {row} has the pages {printable(pages)}, expected {count} for its tokens")
            for position, page in enumerate(pages):
                if page != EMPTY and found.setdefault(page, position) != position:
                    raise StateError(
                        f"page {page} is listed at index {found[page]} and at index {position}, expected one index"
                    )
        self.rows, self.capacity, self._holders = held, capacity, [0] * capacity
        for page in (page for pages in held for page in pages if page != EMPTY):
            self._holders[page] += 1
        self._free = [page for page in range(capacity - 1, -1, -1) if not self._holders[page]]
        self._released = {}
        self._changed()

    def leave_devices(self) -> None:
        """Drops the copies on devices; the next forward uploads them again where it runs."""
        self._with_room.clear()
        self._changed()

    def _compact(self) -> list[int]:
        kept = list(dict.fromkeys(page for row in self.rows for page in row if page != EMPTY))
        number = {EMPTY: EMPTY} | {old: new for new, old in enumerate(kept)}
        self.rows = [[number[page] for page in row] for row in self.rows]
        self._holders = [self._holders[page] for page in kept]
        self._free, self.capacity = [], len(kept)
        return kept

    def _take(self) -> int:
        self.prepare(1)
        page = self._free.pop()
        self._holders[page] = 1
        self._changed(gained=True)
        return page

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def _changed(self, gained: bool = False) -> None:
        """Records that rows' pages changed; `gained`: only by one more page at a row's end."""
        self.version += 1
        self.moves += not gained
        self._shares = None
        self._outdated()
