"""A stage whose numbers differ from row to row."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from calib.runtime.numbers import upload
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.moved import moved, own_tensors
from calib.runtime.stages.transform import Measured, MeasuredBalancer, MeasuredRange, MeasuredScale
from calib.runtime.state import State, dtype_named, named, tensor_like


class RowTransform:
    """A transform, and where it is measured its numbers for every row: tensors `[rows, kv_heads, 1, head_dim]`."""

    def __init__(self, stage: Transform | Measured, like: Tensor, dtype: torch.dtype) -> None:
        """`like [rows, kv_heads, any, head_dim]`; measured numbers are kept in `dtype`."""
        self.dtype = dtype
        self.measured = stage if isinstance(stage, MeasuredRange | MeasuredScale | MeasuredBalancer) else None
        blank = like.new_empty(like.shape[0], like.shape[1], 1, like.shape[3], dtype=dtype)
        self.stage: Transform = stage.neutral(blank) if self.measured else stage  # type: ignore[union-attr,assignment]

    def of(self, rows: range | list[int]) -> Transform:
        """The transform of some rows."""
        if self.measured is None:
            return self.stage
        whole = len(rows) == len(own_tensors(self.stage)[0])
        if whole:
            return self.stage
        if isinstance(rows, range):
            return self._mapped(lambda tensor: tensor[rows.start : rows.stop])
        return self._mapped(lambda tensor: tensor[upload(rows, torch.int64, tensor.device)])

    def measure(self, rows: list[int], tokens: Tensor, query: Tensor) -> None:
        """Fits the transform of `rows` to their tokens and queries, `[len(rows), heads, n, head_dim]`."""
        assert self.measured is not None
        found = self.measured.measure(tokens, query, self.dtype)
        for own, new in zip(own_tensors(self.stage), own_tensors(found), strict=True):
            own[rows] = new

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        if self.measured is not None:
            self.stage = self._mapped(lambda tensor: tensor[sources.to(tensor.device)])

    def to(self, device: torch.device, stage: Transform | Measured) -> None:
        """Moves its numbers; where nothing is measured, `stage` is the plan's, already there."""
        self.stage = moved(self.stage, device) if self.measured else stage  # type: ignore[assignment]

    def state(self) -> State:
        """The rows' numbers; nothing where none are measured."""
        own = {name: value for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return {"dtype": named(self.dtype)} | own if self.measured else {}

    def restore(self, state: State) -> None:
        """See `state`."""
        if self.measured is None:
            return
        self.dtype = dtype_named(state.get("dtype"))
        own = {name: value.to(self.dtype) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        found = {name: tensor_like(state, name, like) for name, like in own.items()}
        self.stage = replace(self.stage, **found)  # type: ignore[type-var]

    def bytes(self) -> int:
        """Of the rows' numbers, from shapes."""
        return sum(t.numel() * t.element_size() for t in own_tensors(self.stage)) if self.measured else 0

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Transform:
        names = {name: change(value) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return replace(self.stage, **names)  # type: ignore[type-var]
