"""A stage whose numbers differ from row to row."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from calib.kernels.to_half import NARROW
from calib.kernels.upload import upload
from calib.runtime.device.row_index import row_index
from calib.runtime.files.state import State, StateError, dtype_named, named, tensor_like
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.to_device import tensors_of, to_device
from calib.runtime.stages.transform import Measured

# What tokens or queries are divided by: positive, and no smaller than a number of 16 bits, as all that is measured is; a scale of 0
# is a channel of zeros, and divides nothing.
DIVISORS = frozenset({"half", "scale", "balance"})


class RowTransform:
    """A transform, and where it is measured its numbers for every row: tensors `[rows, kv_heads, 1, head_dim]`."""

    def __init__(self, stage: Transform | Measured, like: Tensor, dtype: torch.dtype) -> None:
        """`like [rows, kv_heads, any, head_dim]`; measured numbers are kept in `dtype`."""
        self.dtype = dtype
        self.measured = stage.measured
        blank = like.new_empty(like.shape[0], like.shape[1], 1, like.shape[3], dtype=dtype)
        self.stage: Transform = stage.neutral(blank) if self.measured else stage  # type: ignore[union-attr,assignment]

    def of(self, rows: range | list[int]) -> Transform:
        """The transform of some rows."""
        if self.measured is None:
            return self.stage
        whole = len(rows) == len(tensors_of(self.stage)[0])
        if whole:
            return self.stage
        if isinstance(rows, range):
            return self._mapped(lambda tensor: tensor[rows.start : rows.stop])
        return self._mapped(lambda tensor: tensor[upload(rows, torch.int64, tensor.device)])

    def widen(self) -> None:
        """Measured numbers in float32, before any was measured."""
        if self.measured is not None:
            self.dtype, self.stage = torch.float32, self._mapped(torch.Tensor.float)

    def measure(self, rows: list[int], tokens: Tensor, query: Tensor, order: Tensor | None = None) -> None:
        """Fits the transform of `rows` to their tokens `[len(rows), kv_heads, n, head_dim]`, or to those at `order [..., m]`, and
        to their queries, `[len(rows), heads, n, head_dim]`."""
        assert self.measured is not None
        own = tensors_of(self.stage)
        index = row_index(rows, own[0].device)
        if isinstance(index, slice):  # a view, into which numbers are written without a copy
            self.measured.measure(tokens, query, self.dtype, order, [tensor[index] for tensor in own])
            return
        found = tensors_of(self.measured.measure(tokens, query, self.dtype, order))
        for tensor, new in zip(own, found, strict=True):
            tensor[index] = new

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        if self.measured is not None:
            self.stage = self._mapped(lambda tensor: tensor[sources.to(tensor.device)])

    def to(self, device: torch.device, stage: Transform | Measured) -> None:
        """Moves its numbers; where nothing is measured, `stage` is the plan's, already there."""
        self.stage = to_device(self.stage, device) if self.measured else stage  # type: ignore[assignment]

    def state(self) -> State:
        """The rows' numbers; nothing where none are measured."""
        own = {name: value for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return {"dtype": named(self.dtype)} | own if self.measured else {}

    def restore(self, state: State) -> None:
        """See `state`."""
        if self.measured is None:
            return
        self.dtype = dtype_named(state.get("dtype"))
        if self.dtype not in (torch.float16, torch.float32):
            raise StateError(f"'dtype' of a transform is {named(self.dtype)}, expected float16 or float32")
        own = {name: value.to(self.dtype) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        found = {name: tensor_like(state, name, like) for name, like in own.items()}
        for name in DIVISORS & found.keys():
            divides = found[name][found[name] != 0] if name == "scale" and not found[name].is_meta else found[name]
            if divides.numel() and not divides.is_meta and float(divides.min()) < NARROW:
                raise StateError(f"{name!r} has values below {NARROW:.3g}, and tokens are divided by it")
        self.stage = replace(self.stage, **found)  # type: ignore[type-var]

    def bytes(self) -> int:
        """Of the rows' numbers, from shapes."""
        return sum(t.numel() * t.element_size() for t in tensors_of(self.stage)) if self.measured else 0

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Transform:
        names = {name: change(value) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return replace(self.stage, **names)  # type: ignore[type-var]
