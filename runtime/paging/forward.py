"""What one forward adds to each sequence of the batch, computed once and shared by all layers.

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
    """The tokens of one layer in an unconfirmed forward: `store(forward, *parts)` stores them; parts are
    `[rows, heads, width, D]`."""

    store: "Callable[..., None]"
    parts: tuple[Tensor, ...]


@dataclass
class Forward:
    """What one forward adds: for each row the `before` tokens held and the `counts` of new real tokens.

    `columns[r]` are the columns of the real tokens among the forward's `width`; None where all are real. `pending` counts the
    layers that have yet to store it. With `recorded`, the tokens stay unconfirmed, in `drafts`. Pages of tokens
    before `oldest[r]` may be freed. `copies` are, for each table, the shared pages to duplicate before anything is written.
    `ids [rows, width]` are the token ids, where a method needs them. With `speculative` there is one more column, the last,
    that is attended and never stored. `host_forward` is the same forward for the sequence state of the host. A step that a
    graph records or replays has `graph_inputs`, tensors at fixed addresses for its numbers. With `fixed_shapes` all shapes are
    those of the whole block of steps, and only the contents of tensors are the step's own. `choices`: for which devices kernels
    run by Triton, decided by the first layer.
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
    readings: dict[Hashable, Any] = field(default_factory=dict)  # what its layers read, computed by the first
    choices: dict[torch.device, bool] = field(default_factory=dict)
    ids: Tensor | None = None
    speculative: bool = False
    host_forward: "Forward | None" = None
    graph_inputs: GraphInputs["Forward"] | None = None
    fixed_shapes: bool = False

    @property
    def of_block(self) -> bool:
        """Whether the shapes are the same in all steps of the block."""
        return self.fixed_shapes or self.graph_inputs is not None

    @property
    def worked_out(self) -> dict[Hashable, Any]:
        """All that its layers have computed and share so far."""
        return self.readings | dict(self.tensors)

    @cached_property
    def after(self) -> list[int]:
        """Tokens each row holds once the forward is stored."""
        return [held + new for held, new in zip(self.before, self.counts, strict=True)]

    @cached_property
    def equal_length_groups(self) -> list[list[int]]:
        """Rows that can be stored together: rows of equal length, where nothing is padded; else each row with new tokens alone."""
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
        """The same forward without its last `removed` columns."""
        width = self.width - removed
        counts, columns = [width] * len(self.before), None
        if self.columns is not None:
            columns = [real[real < width] for real in self.columns]
            counts = list(map(len, columns))
        ids = None if self.ids is None else self.ids[:, :width]
        return Forward(self.before, counts, columns, width, self.pending, ids=ids)

    def hold(self, draft: Draft) -> None:
        """Keeps one layer's tokens as a draft, after the layer has attended."""
        self.drafts.append(draft)
        self._layer_done()

    def started_over(self, layers: int) -> None:
        """Resets the forward to the state in which none of the `layers` has stored it, after a failed recording."""
        self.pending, self.graph_inputs = layers, None
        self.tensors.clear()
        self.readings.clear()

    def stored(self) -> None:
        """Counts one layer that has stored the forward. After the last one, tensors and the memory of graphs are released."""
        self._layer_done()
        if not self.pending:
            self.columns = self.ids = self.host_forward = self.graph_inputs = None

    def stored_by_all(self) -> None:
        """Marks the forward as stored by all layers."""
        self.pending = 1
        self.stored()

    def tensor(
        self, name: str, numbers: "Numbers[Forward]", device: torch.device, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """`numbers(self)` as a tensor `[n]` of `dtype` on `device`; uploaded once for all layers under this `name`."""
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
