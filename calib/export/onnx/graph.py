"""Builds ONNX graphs in the style of tensor code: operators on a `Value` append nodes to its `Graph`.

    graph = Graph()
    x = graph.input("keys", np.float32, ("batch", 2, "tokens", 64))
    graph.output("doubled", x * 2, ("batch", 2, "tokens", 64))

Integers are int32. ONNX shifts take only unsigned types, few of which runtimes implement, so a shift is a product with or a
quotient by a power of two; a mask is BitwiseAnd. Shapes of values are not tracked, so axes must be counted from 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET = 18  # the first with BitwiseAnd
IR_VERSION = 8  # of the same ONNX release, so that older runtimes can read it

Number = Union["Value", int, float, np.ndarray]
Dim = Union["Value", int]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a graph, with its name and numpy dtype."""

    graph: "Graph"
    name: str
    dtype: np.dtype

    def __add__(self, other: Number) -> "Value":
        return self._with("Add", other)

    def __sub__(self, other: Number) -> "Value":
        return self._with("Sub", other)

    def __mul__(self, other: Number) -> "Value":
        return self._with("Mul", other)

    def __truediv__(self, other: Number) -> "Value":
        return self._with("Div", other)

    def __and__(self, other: Number) -> "Value":
        return self._with("And" if self.dtype == np.bool_ else "BitwiseAnd", other)

    def __or__(self, other: Number) -> "Value":
        return self._with("Or", other)

    def __gt__(self, other: Any) -> "Value":
        return self._with("Greater", other, np.bool_)

    def __lt__(self, other: Any) -> "Value":
        return self._with("Less", other, np.bool_)

    def __le__(self, other: Any) -> "Value":
        return self._with("LessOrEqual", other, np.bool_)

    def __ge__(self, other: Any) -> "Value":
        return self._with("GreaterOrEqual", other, np.bool_)

    def __neg__(self) -> "Value":
        return self.op("Neg")

    def __invert__(self) -> "Value":
        return self.op("Not")

    def __matmul__(self, other: "Value") -> "Value":
        return self.op("MatMul", other)

    def _with(self, kind: str, other: Number, dtype: Any = None) -> "Value":
        return self.graph.op(kind, self, self.graph.like(other, self.dtype), dtype=dtype)

    def op(self, kind: str, *others: "Value", dtype: Any = None, **attributes: Any) -> "Value":
        """Returns the ONNX operator `kind` applied to this and `others`; `dtype` is the result's, by default this one's."""
        return self.graph.op(kind, self, *others, dtype=dtype, **attributes)

    def cast(self, dtype: Any) -> "Value":
        """Returns the value cast to `dtype`: floats to floats are rounded to nearest even, floats to integers towards 0."""
        to = np.dtype(dtype)
        return self if to == self.dtype else self.op("Cast", dtype=to, to=helper.np_dtype_to_tensor_dtype(to))

    def reshape(self, *dims: Dim) -> "Value":
        """Reshape; 0 keeps the length of the axis at that position, -1 is inferred."""
        return self.op("Reshape", self.graph.dims(dims))

    def reshape_to(self, *dims: Dim) -> "Value":
        """Reshape to lengths of which any may be 0."""
        return self.op("Reshape", self.graph.dims(dims), allowzero=1)

    def expand(self, *dims: Dim) -> "Value":
        """Broadcast against a shape, given as lengths or one tensor of lengths."""
        return self.op("Expand", self.graph.dims(dims))

    def permute(self, *axes: int) -> "Value":
        """Permutes the axes."""
        return self.op("Transpose", perm=axes)

    def shape(self) -> "Value":
        """Returns the lengths of all axes, int64 `[rank]`."""
        return self.op("Shape", dtype=np.int64)

    def size(self, axis: int) -> "Value":
        """Returns the length of an axis, int64 `[1]`."""
        return self.op("Shape", dtype=np.int64, start=axis, end=axis + 1)

    def part(self, axis: int, start: Dim, stop: Dim) -> "Value":
        """Returns entries `start` ... `stop` - 1 of an axis."""
        return self.op("Slice", *(self.graph.dims([end]) for end in (start, stop, axis)))

    def split(self, axis: int, sizes: Sequence[Dim]) -> list["Value"]:
        """Splits an axis into parts of these lengths."""
        if len(sizes) == 1:
            return [self]
        return self.graph.ops("Split", self, self.graph.dims(sizes), outputs=len(sizes), axis=axis)

    def pad(self, axis: int, rank: int, missing: Dim) -> "Value":
        """Appends `missing` zeros to an axis of a tensor with `rank` axes."""
        ends = [0] * (2 * rank)
        return self.op("Pad", self.graph.dims([*ends[: rank + axis], missing, *ends[rank + axis + 1 :]]))

    def sum(self, *axes: int, keep: bool = True) -> "Value":
        """Sums over axes."""
        return self._reduced("ReduceSum", axes, keep)

    def max(self, *axes: int, keep: bool = True) -> "Value":
        """Maximum over axes."""
        return self._reduced("ReduceMax", axes, keep)

    def min(self, *axes: int, keep: bool = True) -> "Value":
        """Minimum over axes."""
        return self._reduced("ReduceMin", axes, keep)

    def _reduced(self, kind: str, axes: Sequence[int], keep: bool) -> "Value":
        return self.op(kind, self.graph.dims(axes), keepdims=int(keep))

    def argmax(self, axis: int) -> "Value":
        """Returns the index of the first maximum along an axis, which is kept with length 1; int64."""
        return self.op("ArgMax", dtype=np.int64, axis=axis, keepdims=1, select_last_index=0)

    def abs(self) -> "Value":
        """Returns |x|."""
        return self.op("Abs")

    def clamp(self, least: float | int, most: float | int) -> "Value":
        """Clamps to [least, most]."""
        return self.op("Clip", *(self.graph.like(end, self.dtype) for end in (least, most)))

    def at_least(self, least: float | int) -> "Value":
        """Returns max(x, least)."""
        return self._with("Max", least)

    def gather(self, axis: int, positions: "Value") -> "Value":
        """Gathers entries along an axis by an index tensor (as torch.gather)."""
        return self.op("GatherElements", positions, axis=axis)

    def entries(self, axis: int, numbers: Sequence[int]) -> "Value":
        """Selects entries of an axis by constant indices."""
        return self.op("Gather", self.graph.constant(list(numbers), np.int64), axis=axis)

    def take(self, rows: "Value") -> "Value":
        """Selects entries of axis 0 by the indices `rows`."""
        return self.op("Gather", rows, axis=0)


class Graph:
    """A graph under construction: nodes in the order of their calls, deduplicated constants, inputs and outputs."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], tuple[Value, onnx.TensorProto]] = {}
        self._count = 0

    def input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> Value:
        """Adds an input; a string in `shape` names an axis of any length."""
        self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))
        return Value(self, name, np.dtype(dtype))

    def output(self, name: str, value: Value, shape: Sequence[int | str]) -> None:
        """Adds `value` as the output `name`."""
        self.nodes.append(helper.make_node("Identity", [value.name], [name]))
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, array: Any, dtype: Any = None) -> Value:
        """Returns `array` as an initialiser; equal constants are stored once."""
        data = np.ascontiguousarray(array, dtype) if np.ndim(array) else np.array(array, dtype)
        key = (data.dtype.str, data.shape, data.tobytes())
        if key not in self._constants:
            value = Value(self, f"c{len(self._constants)}", data.dtype)
            self._constants[key] = value, numpy_helper.from_array(data, value.name)
        return self._constants[key][0]

    def like(self, number: Number, dtype: Any) -> Value:
        """Returns a `Value` as it is, a number or array as a constant of `dtype`."""
        return number if isinstance(number, Value) else self.constant(number, dtype)

    def dims(self, dims: Sequence[Dim]) -> Value:
        """Returns lengths (numbers or int64 `[1]` values) as one int64 tensor."""
        if all(isinstance(dim, int) for dim in dims):
            return self.constant(list(dims), np.int64)
        parts = [dim if isinstance(dim, Value) else self.constant([dim], np.int64) for dim in dims]
        return parts[0] if len(parts) == 1 else self.join(parts, 0)

    def join(self, parts: Sequence[Value], axis: int) -> Value:
        """Concatenates along an axis."""
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=axis)

    def where(self, condition: Value, yes: Number, no: Number) -> Value:
        """Chooses elementwise; `yes` or `no` must be a `Value`, whose dtype the result has."""
        dtype = next(part.dtype for part in (yes, no) if isinstance(part, Value))
        return self.op("Where", condition, self.like(yes, dtype), self.like(no, dtype), dtype=dtype)

    def up_to(self, stop: Value) -> Value:
        """Returns 0, 1, ..., `stop` - 1, int64; `stop` is int64 `[1]`."""
        ends = (self.constant(0, np.int64), self.op("Squeeze", stop), self.constant(1, np.int64))
        return self.op("Range", *ends)

    def repeat(self, times: Value, start: Value, step: Callable[[Value], Value]) -> Value:
        """Applies `step` to `start` `times` times (int64 `[1]`), as an ONNX Loop."""
        whole, self.nodes = self.nodes, []
        state, going = (self._new(dtype) for dtype in (start.dtype, np.bool_))
        ahead = self.op("Identity", going)
        after = step(state)
        kinds = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in (state, going)]
        number = helper.make_tensor_value_info(f"{state.name}_round", onnx.TensorProto.INT64, [])
        of_state, of_going = (
            [helper.make_tensor_value_info(value.name, kind, shape) for value in values]
            for values, kind, shape in (((state, after), kinds[0], None), ((going, ahead), kinds[1], []))
        )
        body = helper.make_graph(self.nodes, "round", [number, of_going[0], of_state[0]], [of_going[1], of_state[1]])
        self.nodes = whole
        return self.op("Loop", self.op("Squeeze", times), self.constant(True), start, dtype=start.dtype, body=body)

    def op(self, kind: str, *inputs: Value, dtype: Any = None, **attributes: Any) -> Value:
        """Appends an operator with one result; `dtype` is the result's, by default the first input's."""
        return self.ops(kind, *inputs, outputs=1, dtypes=[dtype], **attributes)[0]

    def ops(
        self, kind: str, *inputs: Value, outputs: int, dtypes: Sequence[Any] | None = None, **attributes: Any
    ) -> list[Value]:
        """Appends an operator with several results; a dtype that is not given is the first input's."""
        found = [self._new(inputs[0].dtype if dtype is None else dtype) for dtype in dtypes or [None] * outputs]
        given, given_out = ([value.name for value in values] for values in (inputs, found))
        self.nodes.append(helper.make_node(kind, given, given_out, **attributes))
        return found

    def _new(self, dtype: Any) -> Value:
        self._count += 1
        return Value(self, f"v{self._count}", np.dtype(dtype))

    def model(self, name: str, metadata: Mapping[str, str], producer: str, version: str) -> onnx.ModelProto:
        """Returns the graph as a model, checked with full shape inference."""
        initialisers = [tensor for _, tensor in self._constants.values()]
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, initialisers)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name=producer,
            producer_version=version,
        )
        helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model, full_check=True)
        return model
