"""The graphs of one stream of a tier: `encode`, `decode`, and `measure` if its transform, or channel scales over the tokens of
several tiers, are measured at run time."""

import numpy as np

from calib.export.onnx.graph import Graph, Value
from calib.export.onnx.parts import Stream
from calib.export.onnx.shape import Field, Fields
from calib.export.onnx.transform import measure, root_of_largest
from calib.runtime.stages.codec.corrected import OVERFLOWED


def stream_graphs(stream: Stream) -> dict[str, Graph]:
    """Returns the stream's graphs by name; none if tokens are exact."""
    if stream.writer is None:
        return {}
    graphs = {"encode": encode_graph(stream), "decode": decode_graph(stream)}
    return {"measure": measure_graph(stream)} | graphs if stream.measured or stream.scales() else graphs


def measure_graph(stream: Stream) -> Graph:
    """Returns the graph from a row's first tokens (and queries) to the transform's parameters, or from a block to channel
    scales."""
    graph, query = Graph(), None
    tokens = inputs(graph, {stream.role: tokens_of(stream)})[stream.role]
    if not stream.measured:
        scales = {name: field._replace(tokens_per_row=None) for name, field in stream.scales().items()}
        _put_out(graph, dict.fromkeys(scales, root_of_largest(tokens, stream.fp32_params)), scales)
        return graph
    if stream.transform.needs_queries:
        query = graph.input("query", np.float32, ("batch", "heads", "rows", stream.shape.channels))
    found = measure(stream.transform, tokens, query, stream.shape, stream.fp32_params)
    _put_out(graph, found, stream.numbers())
    return graph


def encode_graph(stream: Stream) -> Graph:
    """Returns the graph from tokens to fields; measured parameters and the fields of keys that predict values are inputs too."""
    graph, writer = Graph(), stream.writer
    assert writer is not None
    tokens = inputs(graph, {stream.role: tokens_of(stream)})[stream.role]
    if stream.predicted is not None:
        tokens = tokens - stream.predicted.values(inputs(graph, stream.predicted.fields()))
    scales = inputs(graph, stream.scales()).values()
    found = writer.encode(stream.map(graph, inputs(graph, stream.numbers())).forward(tokens), *scales)
    _put_out(graph, found, writer.fields())
    return graph


def decode_graph(stream: Stream) -> Graph:
    """Returns the graph from fields to tokens; measured parameters and the fields of keys that predict values are inputs too."""
    graph, writer = Graph(), stream.writer
    assert writer is not None
    block, given = inputs(graph, writer.fields()), inputs(graph, stream.numbers())
    tokens = stream.map(graph, given).inverse(writer.decode(block))
    if stream.predicted is not None:
        tokens = tokens + stream.predicted.values(inputs(graph, stream.predicted.fields()))
    _put_out(graph, {stream.role: tokens}, {stream.role: tokens_of(stream)})
    return graph


def inputs(graph: Graph, fields: Fields, prefix: str = "") -> dict[str, Value]:
    """Adds an input for every field; returns them by the field's name."""
    return {name: graph.input(prefix + name, field.dtype, field.shape(prefix)) for name, field in fields.items()}


def tokens_of(stream: Stream) -> Field:
    """Returns the field of uncompressed tokens: float32 `[batch, kv_heads, tokens, D]`."""
    return Field(np.float32, stream.shape.heads, 1, stream.shape.channels)


def _put_out(graph: Graph, found: dict[str, Value], fields: Fields) -> None:
    for name, value in found.items():
        if name == OVERFLOWED:  # a count per row, not a field
            graph.output(name, value, ("batch",))
            continue
        assert value.dtype == np.dtype(fields[name].dtype), (name, value.dtype)
        graph.output(name, value, fields[name].shape())
