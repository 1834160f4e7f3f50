"""Rows: how many tokens each sequence of the batch holds, and what one forward adds to it.

Padding is never stored: a row's tokens are the real ones alone, counted from 0. All layers of a cache see the same
tokens, so the lengths, the page table and the index tensors of a forward are worked out once, by the first layer that
the forward reaches, and used by all. Lengths live on the host; they are read from the device (the padding mask) only in
a forward of several tokens, never in a decode step.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from calib.runtime.pages import PAGE_TOKENS, PageTable, upload
from calib.runtime.stages.contract import Schedule


@dataclass
class Forward:
    """What one forward adds: `before` tokens held and `counts` real tokens arriving, for each row.

    `columns[r]` are the real tokens' places among the forward's `width` columns, None where all are real. `pending`
    layers have yet to store it. `copies` are the shared pages that must be duplicated before anything is written.
    """

    before: list[int]
    counts: list[int]
    columns: list[Tensor] | None
    width: int
    pending: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    tensors: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    readings: dict[Hashable, Any] = field(default_factory=dict)  # of reading.py, which stands on this file

    @cached_property
    def after(self) -> list[int]:
        """Tokens each row holds once the forward is stored."""
        return [held + new for held, new in zip(self.before, self.counts, strict=True)]

    @cached_property
    def alike(self) -> list[list[int]]:
        """Rows that can be stored together: those without padding that held equally much; a padded row alone."""
        if self.columns is not None:
            return [[row] for row, count in enumerate(self.counts) if count]
        groups: dict[int, list[int]] = {}
        for row, held in enumerate(self.before):
            groups.setdefault(held, []).append(row)
        return list(groups.values())

    def stored(self) -> None:
        """A layer has stored the forward; after the last one nothing of it is kept on the device."""
        self.pending -= 1
        if not self.pending:
            self.columns = None
            self.tensors.clear()
            self.readings.clear()

    def tensor(self, name: str, numbers: list[int], device: torch.device) -> Tensor:
        """`numbers` on the device as int64 `[n]`; uploaded once for all layers under this `name`."""
        if (name, device) not in self.tensors:
            self.tensors[name, device] = upload(numbers, torch.int64, device)
        return self.tensors[name, device]


class Rows:
    """Lengths and pages of all rows, advanced once a forward."""

    def __init__(self, keys: Schedule, values: Schedule, layers: int) -> None:
        """The schedules of both streams and the number of layers that share these rows."""
        self.keys, self.values, self.layers = keys, values, layers
        self.clear()

    def clear(self) -> None:
        """Forgets every row."""
        self.lengths: list[int] = []
        self.table = PageTable()
        self.steps = 0
        self.forward: Forward | None = None

    def begin(self, step: int, batch: int, width: int, mask: Tensor | None) -> Forward:
        """The forward number `step`, as the layer that asks counts them; starts it where this layer is the first.

        `mask [batch, at least width]` is the padding mask of all columns so far; None where nothing is padding.
        """
        if step == self.steps and self.forward is not None:
            return self.forward
        if step != self.steps + 1 or (self.forward is not None and self.forward.pending):
            raise RuntimeError(
                "the last forward was interrupted and layers disagree on what they hold; call cache.reset()"
            )
        if not self.lengths:
            self.lengths = [0] * batch
            self.table.rows = [[] for _ in range(batch)]
        if len(self.lengths) != batch:
            raise ValueError(f"the cache holds {len(self.lengths)} rows and got {batch}; use a cache for each batch")
        counts, columns = self._real_columns(width, mask)
        forward = Forward(list(self.lengths), counts, columns, width, self.layers)
        self._reserve(forward)
        self.lengths, self.steps, self.forward = forward.after, step, forward
        return forward

    def packed(self, length: int) -> int:
        """Tokens of which key and value are both encoded: what attention reads from pages alone."""
        return min(self.keys.packed(length), self.values.packed(length))

    def permute(self, sources: list[int]) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        if self.lengths:
            self.lengths = [self.lengths[source] for source in sources]
            self.table.permute(sources)

    def _real_columns(self, width: int, mask: Tensor | None) -> tuple[list[int], list[Tensor] | None]:
        batch = len(self.lengths)
        # A decode step adds one real token to each row; a row that holds none yet may still be in its padding.
        if mask is None or (width == 1 and all(self.lengths)):
            return [width] * batch, None
        on_host = mask.cpu()
        hidden = on_host[:, :-width].sum(-1).tolist()
        if hidden != self.lengths:
            raise ValueError(
                f"attention_mask shows {hidden} earlier tokens and the cache holds {self.lengths}; tokens once stored "
                "cannot be masked: pass the mask of the whole sequence, padding 0 and everything else 1"
            )
        new = on_host[:, -width:]
        counts = new.sum(-1).tolist()
        if all(count == width for count in counts):
            return counts, None
        return counts, [row.nonzero()[:, 0].to(mask.device) for row in new]

    def _reserve(self, forward: Forward) -> None:
        written, pages = [], []
        for before, after in zip(forward.before, forward.after, strict=True):
            spans = [(s.encoded(before), s.encoded(after)) for s in (self.keys, self.values)]
            writes = {
                page
                for start, stop in spans
                for page in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS))
                if stop > start
            }
            pages.append(max(-(-stop // PAGE_TOKENS) for _, stop in spans))
            written.append(sorted(writes))
        self.table.prepare(sum(max(0, n - len(held)) for n, held in zip(pages, self.table.rows, strict=True)))
        for row, (count, positions) in enumerate(zip(pages, written, strict=True)):
            forward.copies += self.table.reserve(row, count, positions)
