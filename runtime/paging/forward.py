"""What one forward adds to each sequence of the batch, worked out once and shared by all layers.

The index tensors of a forward are made by the first layer that it reaches. Its lengths live on the host; they are read from the
device (the padding mask) only in a forward of several tokens, never in a decode step.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.kernels.upload import upload
from calib.runtime.device.graph_inputs import GraphInputs, Numbers
from calib.runtime.device.row_index import row_index


class Draft(NamedTuple):
    """What one layer was given in a forward that is not confirmed, `[rows, heads, width, head_dim]` each, for `store`."""

    store: "Callable[..., None]"
    parts: tuple[Tensor, ...]


@dataclass
class Forward:
    """What one forward adds: `before` tokens held and `counts` real tokens arriving, for each row.

    `columns[r]` are the real tokens' positions among the forward's `width` columns, None where all are real. `pending`
    layers have yet to store it. `oldest[r]` is where the pages begin that a later forward can still read. `copies` are
    the shared pages of each table that must be duplicated before anything is written. `drafts` are its tokens while
    unconfirmed. `ids [rows, width]` are the token ids, where a method asked for them. With a `speculative` one more column, the
    last, is attended and counts nowhere. `host_forward` is the same forward in the host's state. A step that a graph records or
    replays has `graph_inputs`, where its numbers always lie. With `fixed_shapes` all shapes are those of the whole block of steps
    that it belongs to, and only contents of tensors are its own. `choices` say of which devices kernels are Triton's: no layer asks
    again what the first has asked.
    """

    before: list[int]
    counts: list[int]
    columns: list[Tensor] | None
    width: int
    pending: int
    recorded: bool = False
    oldest: list[int] = field(default_factory=list)
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    tensors: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    readings: dict[Hashable, Any] = field(default_factory=dict)  # what its layers read, worked out by the first
    choices: dict[torch.device, bool] = field(default_factory=dict)
    ids: Tensor | None = None
    speculative: bool = False
    host_forward: "Forward | None" = None
    graph_inputs: GraphInputs["Forward"] | None = None
    fixed_shapes: bool = False

    @property
    def of_block(self) -> bool:
        """Whether its shapes are those of every step in its block."""
        return self.fixed_shapes or self.graph_inputs is not None

    @property
    def worked_out(self) -> dict[Hashable, Any]:
        """What its layers share so far."""
        return self.readings | dict(self.tensors)

    @cached_property
    def after(self) -> list[int]:
        """Tokens each row holds once the forward is stored."""
        return [held + new for held, new in zip(self.before, self.counts, strict=True)]

    @cached_property
    def equal_length_groups(self) -> list[list[int]]:
        """Rows that can be stored together: those without padding that held equally much; a padded row alone."""
        if self.columns is not None:
            return [[row] for row, count in enumerate(self.counts) if count]
        groups: dict[int, list[int]] = {}
        for row, held in enumerate(self.before):
            groups.setdefault(held, []).append(row)
        return list(groups.values())

    def real(self, new: Tensor, rows: list[int]) -> Tensor:
        """The real tokens of `rows`, a group of equal length, among `new [all rows, heads, width, D]`."""
        tokens = new if len(rows) == new.shape[0] else new[row_index(rows, new.device)]
        return tokens if self.columns is None else tokens[:, :, self.columns[rows[0]].to(new.device)]

    def without(self, removed: int) -> "Forward":
        """The same forward as if its last `removed` columns had never come."""
        width = self.width - removed
        counts, columns = [width] * len(self.before), None
        if self.columns is not None:
            columns = [real[real < width] for real in self.columns]
            counts = list(map(len, columns))
        ids = None if self.ids is None else self.ids[:, :width]
        return Forward(self.before, counts, columns, width, self.pending, ids=ids)

    def hold(self, draft: Draft) -> None:
        """A layer has attended but keeps its tokens as drafts."""
        self.drafts.append(draft)
        self._layer_done()

    def started_over(self, layers: int) -> None:
        """None of the `layers` has stored it: what they did was not done."""
        self.pending, self.graph_inputs = layers, None
        self.tensors.clear()
        self.readings.clear()

    def stored(self) -> None:
        """A layer has stored the forward; after the last one nothing of it is kept on the device, nor memory that a graph reads."""
        self._layer_done()
        if not self.pending:
            self.columns = self.ids = self.host_forward = self.graph_inputs = None

    def stored_by_all(self) -> None:
        """All layers have."""
        self.pending = 1
        self.stored()

    def tensor(
        self, name: str, numbers: "Numbers[Forward]", device: torch.device, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """What `numbers` makes of this forward, on the device, `[n]`; uploaded once for all layers under this `name`."""
        if self.graph_inputs is not None:
            return self.graph_inputs.tensor(name, numbers, dtype, device, self)
        if (name, device) not in self.tensors:
            self.tensors[name, device] = upload(numbers(self), dtype, device)
        return self.tensors[name, device]

    def _layer_done(self) -> None:
        self.pending -= 1
        if not self.pending:
            for forward in (self, self.host_forward):
                if forward is not None:
                    forward.tensors.clear()
                    forward.readings.clear()
