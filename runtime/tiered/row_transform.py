"""A transform whose parameters may differ from row to row."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from calib.kernels.to_half import NARROW
from calib.kernels.upload import upload
from calib.runtime.device.row_index import row_index
from calib.runtime.files.state import State, StateError, dtype_named, tensor_like
from calib.runtime.messages.dtype_name import dtype_name
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.to_device import tensors_of, to_device
from calib.runtime.stages.transform import Measured

# Parameters by which tokens or queries are divided. Those in a file must be positive and not smaller than a normal 16-bit
# number, as measured ones are. A scale may be 0: its channel is zero, and nothing is divided by it.
DIVISORS = frozenset({"half", "scale", "balance"})


class RowTransform:
    """A transform; where it is measured, with parameters for every row, tensors `[rows, kv_heads, 1, head_dim]`."""

    def __init__(self, stage: Transform | Measured, like: Tensor, dtype: torch.dtype) -> None:
        """`like [rows, kv_heads, any, head_dim]` fixes the shape; measured parameters are kept in `dtype`."""
        self.dtype, self.device = dtype, like.device
        self.measured = stage.measured
        self._shape = (like.shape[0], like.shape[1], 1, like.shape[3])
        if self.measured is None:
            self.stage = stage  # type: ignore[assignment]

    @cached_property
    def stage(self) -> Transform:
        """The transform of all rows, neutral for rows that are not measured yet. Mostly all rows are measured before the first
        access."""
        assert self.measured is not None
        return self.measured.neutral(torch.empty(self._shape, dtype=self.dtype, device=self.device))

    @property
    def _has_numbers(self) -> bool:
        return self.measured is not None and "stage" in vars(self)

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
        """Keeps measured parameters in float32; called before any was measured."""
        if self.measured is not None:
            self.dtype = torch.float32
            self._change(torch.Tensor.float)

    def measure(
        self,
        rows: list[int],
        tokens: Tensor,
        query: Tensor,
        order: Tensor | None = None,
        extremes: Tensor | None = None,
    ) -> None:
        """Fits the transform of `rows` to their tokens `[len(rows), kv_heads, n, head_dim]`, or to those at `order [..., m]`,
        and to their queries `[len(rows), heads, n, head_dim]`. `extremes` are those of all tokens, where they are known."""
        assert self.measured is not None
        if not self._has_numbers and rows == list(range(self._shape[0])):
            self.stage = self.measured.measure(tokens, query, self.dtype, order, extremes=extremes)
            return
        own = tensors_of(self.stage)
        index = row_index(rows, self.device)
        if isinstance(index, slice):  # a view, into which numbers are written without a copy
            self.measured.measure(tokens, query, self.dtype, order, [tensor[index] for tensor in own], extremes)
            return
        found = tensors_of(self.measured.measure(tokens, query, self.dtype, order, extremes=extremes))
        for tensor, new in zip(own, found, strict=True):
            tensor[index] = new

    def permute(self, sources: Tensor) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        if self.measured is not None:
            self._shape = (len(sources), *self._shape[1:])
            self._change(lambda tensor: tensor[sources.to(tensor.device)])

    def to(self, device: torch.device, stage: Transform | Measured) -> None:
        """Moves the parameters to `device`; if nothing is measured, takes `stage`, the plan's, which is there already."""
        self.device = device
        if self.measured is None:
            self.stage = stage  # type: ignore[assignment]
        elif self._has_numbers:
            self.stage = to_device(self.stage, device)

    def state(self) -> State:
        """The rows' parameters, for a file; empty where none are measured."""
        own = {name: value for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return {"dtype": dtype_name(self.dtype)} | own if self.measured else {}

    def restore(self, state: State) -> None:
        """Restores the parameters from `state`. Raises StateError for another dtype or shape, and for divisors that are too
        small."""
        if self.measured is None:
            return
        self.dtype = dtype_named(state.get("dtype"))
        if self.dtype not in (torch.float16, torch.float32):
            raise StateError(f"'dtype' of a transform is {dtype_name(self.dtype)}, expected float16 or float32")
        own = {name: value.to(self.dtype) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        found = {name: tensor_like(state, name, like) for name, like in own.items()}
        for name in DIVISORS & found.keys():
            divides = found[name][found[name] != 0] if name == "scale" and not found[name].is_meta else found[name]
            if divides.numel() and not divides.is_meta and float(divides.min()) < NARROW:
                raise StateError(f"{name!r} has values below {NARROW:.3g}, and tokens are divided by it")
        self.stage = replace(self.stage, **found)  # type: ignore[type-var]

    def bytes(self) -> int:
        """Bytes of the rows' parameters, from shapes."""
        return sum(t.numel() * t.element_size() for t in tensors_of(self.stage)) if self._has_numbers else 0

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes the parameters of all rows, where there are any yet."""
        if self._has_numbers:
            self.stage = self._mapped(change)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Transform:
        names = {name: change(value) for name, value in vars(self.stage).items() if isinstance(value, Tensor)}
        return replace(self.stage, **names)  # type: ignore[type-var]
