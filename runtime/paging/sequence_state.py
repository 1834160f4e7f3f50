"""How many tokens each sequence of the batch holds, in which pages, and how a forward advances both.

Padding is never stored: a row's tokens are the real ones alone, counted from 0. All layers of a cache see the same
tokens, so lengths and pages are computed once, by the first layer that a forward reaches, and used by all (`forward.py`).

While past recording is on (prompt lookup, assisted decoding), a forward may hold drafts: its tokens stay exact, in no window and
no page, until `confirm` says how many of them are kept. The kept ones are then stored as if only they had come.

While `speculating`, the last column of the next forward is a speculative token: it is attended and scored, and never becomes
one of the row's tokens.

An offloaded cache has a second state, for the pages on the host that hold the same tokens; both are advanced together.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor

from calib.runtime.files.state import State
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.paging.pages import GROWTH, PageTable
from calib.runtime.tape.taped_steps import TapedSteps

INTERRUPTED = "the last forward was interrupted, so layers may hold different tokens; call cache.reset()"


class SequenceState(ABC):
    """Lengths and pages of all rows, advanced once per forward. The first `sinks` tokens of a row are never encoded."""

    sinks = 0
    # Whether memory for more tokens than rows hold is allocated ahead: a replayed graph needs it at fixed addresses.
    keeps_room = False

    def __init__(
        self, layers: int, sliding: int | None = None, page_tokens: Sequence[int] = (PAGE_TOKENS,), growth: int = GROWTH
    ) -> None:
        """`layers` share these rows; `sliding` is their window, if any; `page_tokens` has one entry for each page table;
        `growth` as in `PageTable`."""
        self.layers, self.sliding, self._page_tokens, self._growth = layers, sliding, tuple(page_tokens), growth
        self.host_state: SequenceState | None = None
        self.taped = TapedSteps()
        self.clear()

    def clear(self) -> None:
        """Removes every row, and switches past recording off."""
        if self.host_state is not None:
            self.host_state.clear()
        self.taped.forget()
        self.lengths: list[int] = []
        self.tables = [PageTable(tokens, self._growth) for tokens in self._page_tokens]
        # The number of pages that each row has in every table, at these versions of the tables; None where rows share any page.
        self._held: tuple[list[int], tuple[tuple[int, ...], ...] | None] = ([], None)
        # What `_alike` was computed from, and what the steps of a block share.
        self._alike: tuple[Hashable, Hashable] = None, None
        self.steps = 0
        self.forward: Forward | None = None
        self.recording = self.speculating = False
        self.ids: Tensor | None = None

    def mirror_on_host(self, host_state: "SequenceState") -> None:
        """Makes `host_state` follow: every forward advances it too."""
        self.host_state = host_state

    @property
    def all_tables(self) -> list[PageTable]:
        """Its own tables and those of the host's state."""
        return self.tables + ([] if self.host_state is None else self.host_state.all_tables)

    def state(self) -> State:
        """Lengths and tables, and those of the host's state, for a file; drafts must be confirmed."""
        tables = {str(number): table.state() for number, table in enumerate(self.tables)}
        on_host: State = {} if self.host_state is None else {"host": self.host_state.state()}
        return {"lengths": self.lengths, "tables": tables} | on_host

    @abstractmethod
    def restore_own(self, state: State) -> None:
        """Restores what a subclass has besides lengths and pages; the lengths are restored already (`stored_sequence_state`)."""

    @abstractmethod
    def pages_of(self, row: int, length: int) -> tuple[int, ...]:
        """How many pages of each table `row` has once it holds `length` tokens."""

    def pages_behind(self, forward: Forward) -> tuple[tuple[int, ...], ...]:
        """How many pages of each table every row has once the forward is stored."""
        return tuple([self.pages_of(row, length) for row, length in enumerate(forward.after)])

    def first_page(self, length: int) -> int:
        """The index before which a row of `length` tokens may lack pages."""
        return 0

    def gains(self, table: int) -> bool:
        """Whether rows only gain pages in this table, at their ends; with a sliding window they also lose some."""
        return self.sliding is None

    def room(self, table: int, pages: int) -> int:
        """How many pages of a table decode steps read of a row that has `pages`, before they need more
        (`PageNumbers.with_room`)."""
        return self.tables[table].with_room(pages) if self.gains(table) else pages

    @abstractmethod
    def encoded(self, row: int, length: int) -> int:
        """How many tokens of `row` have an encoded key once it holds `length`: always the first ones after the sinks."""

    def moves_pages(self, forward: Forward) -> bool:
        """Whether any row needs new pages, writes to a shared page, or may free some."""
        if self.sliding is not None:
            return True
        if (versions := [table.version for table in self.tables]) != self._held[0]:
            held = tuple(zip(*(map(len, table.rows) for table in self.tables), strict=True))
            self._held = versions, None if any(table.shares for table in self.tables) else held
        return self._held[1] != self.pages_behind(forward)

    def free_pages(self, number: int, pages: list[int], held: list[int]) -> None:
        """Grows a table's pool so that rows that have `held` pages can have `pages`, with spare ones where room is kept."""

        def missing(wanted: Iterable[int]) -> int:
            return sum(max(0, count - own) for count, own in zip(wanted, held, strict=True))

        if not (self.keeps_room and self.gains(number)):
            self.tables[number].prepare(missing(pages))
            return
        # Where the pool must grow, it also gets what rows will need soon, so that memory moves once for all of them.
        soon = missing(self.room(number, count + 1) for count in pages)
        self.tables[number].prepare(missing(self.room(number, count) for count in pages), soon)

    @abstractmethod
    def reserve(self, forward: Forward) -> None:
        """Gives every row the pages that the forward will write, and sets `forward.copies` and `forward.oldest`."""

    def begin(self, step: int, batch: int, width: int, mask: Tensor | None) -> Forward:
        """Returns the forward number `step`, by the asking layer's count; the first layer to ask starts it.

        `mask [batch, at least width]` is the padding mask of all columns so far, or None without padding. `width` and the mask
        include a speculative token. Raises RuntimeError after an interrupted forward, ValueError for another batch size or a
        mask that does not fit.
        """
        if step == self.steps and self.forward is not None:
            return self.forward
        if step != self.steps + 1:
            raise RuntimeError(INTERRUPTED)
        self.confirm()
        if not self.lengths:
            self._open(batch)
        if len(self.lengths) != batch:
            raise ValueError(f"the cache holds {len(self.lengths)} rows and got {batch}; use a cache for each batch")
        if self.speculating:
            width, mask = width - 1, None if mask is None else mask[:, :-1]
        counts, columns = self._real_columns(width, mask)
        if self.speculating and columns is not None:
            raise ValueError(
                f"a step with a speculative token takes no padding, got {counts} real tokens of {width} by row; leave padding out"
            )
        ids = None if self.ids is None else self.ids[:, :width]
        forward = Forward(
            list(self.lengths),
            counts,
            columns,
            width,
            self.layers,
            self.recording,
            ids=ids,
            speculative=self.speculating,
        )
        forward.host_forward = self._host_forward(forward)
        self.ids, self.speculating = None, False
        self.forward = forward  # pending before anything changes: after an interruption the next is refused
        if not self.recording:
            self._take_in(forward)
        self.steps = step
        return forward

    @property
    def unconfirmed(self) -> int:
        """The number of columns of the last forward that are still drafts."""
        return self.forward.width if self.forward is not None and self.forward.drafts else 0

    @property
    def seen(self) -> list[int]:
        """The number of tokens of each row, drafts included."""
        return self.forward.after if self.forward is not None and self.forward.drafts else self.lengths

    def confirm(self, removed: int = 0) -> None:
        """Stores the drafts of the last forward, if there are any, without its last `removed` columns."""
        forward = self.forward
        if forward is None:
            return
        if forward.pending:
            raise RuntimeError(INTERRUPTED)
        drafts, forward.drafts = forward.drafts, []
        if not drafts:
            return
        forward.pending = len(drafts)
        kept = self.accept(forward, removed)
        for draft in drafts:
            draft.store(kept, *(part[:, :, : kept.width] for part in draft.parts))

    def accept(self, recorded: Forward, removed: int = 0) -> Forward:
        """Advances the state by the `recorded` forward without its last `removed` columns, and returns that forward to be
        stored."""
        self.forward = kept = recorded.without(removed)
        kept.host_forward = self._host_forward(kept)
        self._take_in(kept)
        return kept

    def permute(self, sources: list[int]) -> list[list[int] | None]:
        """Row i becomes a copy of row `sources[i]`. Returns for each of `all_tables` what `PageTable.permute` returns."""
        self.confirm()
        self.taped.forget()
        if not self.lengths:
            return [None] * len(self.all_tables)
        self.lengths = [self.lengths[source] for source in sources]
        kept = [table.permute(sources) for table in self.tables]
        return kept + ([] if self.host_state is None else self.host_state.permute(sources))

    def _real_columns(self, width: int, mask: Tensor | None) -> tuple[list[int], list[Tensor] | None]:
        batch = len(self.lengths)
        # A decode step has one real token per row; but the first column of an empty row may be padding.
        if mask is None or (width <= 1 and all(self.lengths)):
            return [width] * batch, None
        on_host = mask.cpu()
        first = on_host.shape[1] - width
        hidden = on_host[:, :first].sum(-1).tolist()
        if hidden != self.lengths:
            raise ValueError(
                f"attention_mask shows {hidden} earlier tokens and the cache holds {self.lengths}; tokens once stored "
                "cannot be masked: pass the mask of the whole sequence, padding 0 and everything else 1"
            )
        new = on_host[:, first:]
        counts = new.sum(-1).tolist()
        if all(count == width for count in counts):
            return counts, None
        return counts, [row.nonzero()[:, 0].to(mask.device) for row in new]

    def _take_in(self, forward: Forward) -> None:
        """Reserves the pages of a forward and advances the lengths."""
        if all(forward.before) and not self.moves_pages(forward):
            forward.oldest, forward.copies = [0] * len(self.lengths), [[] for _ in self.tables]
        else:
            self.reserve(forward)
            for table in self.tables:
                table.renew()
        self.lengths = forward.after
        if self.host_state is not None and forward.host_forward is not None:
            self.host_state._take_in(forward.host_forward)

    def _open(self, batch: int) -> None:
        """Starts `batch` empty rows."""
        self.lengths = [0] * batch
        for table in self.tables:
            table.rows = [[] for _ in range(batch)]
        if self.host_state is not None:
            self.host_state._open(batch)

    def _host_forward(self, forward: Forward) -> Forward | None:
        """The same forward for the host's state, with pages and tensors of its own; None without one."""
        if self.host_state is None:
            return None
        return Forward(forward.before, forward.counts, forward.columns, forward.width, forward.pending)
