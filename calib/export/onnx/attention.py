"""A decode step's attention over packed tiers and an exact window, in one graph: the counterpart of `runtime/attend/attend.py`
without its tiles.

Tokens are always in the same order: tier by tier, then the window. Keys and values may have different numbers of tokens in tier
and window (as in KIVI), as long as their totals are equal.
"""

import numpy as np

from calib.export.onnx.graph import Graph, Value
from calib.export.onnx.parts import Layer, Stream, Tier
from calib.export.onnx.stream_graphs import inputs, tokens_of

LEAST = float(np.finfo(np.float32).min)
TINY = float(np.finfo(np.float32).tiny)


def attend_graph(layer: Layer) -> Graph:
    """Returns the graph from query, fields of every tier, window and mask to attention output and log-sum-exp."""
    graph, (heads, channels) = Graph(), layer.shape
    query = graph.input("query", np.float32, ("batch", "heads", "rows", channels))
    # The query rows of a KV head: for each query head of its group, that head's rows.
    grouped = query.reshape(0, heads, -1, channels) * (channels**-0.5)
    keys = [_Part(graph, tier, tier.keys, layer.before_rope) for tier in layer.tiers]
    of_keys = [{f"keys.{name}": field for name, field in part.block.items()} for part in keys]
    windows = [
        graph.input(f"{role}.window", np.float32, ("batch", heads, f"{role}.recent", channels))
        for role in ("keys", "values")
    ]
    values = [_Part(graph, tier, tier.values, False) for tier in layer.tiers]
    mask = graph.input("mask", np.bool_, ("batch", "rows", "all"))

    scores = graph.join([part.scores(grouped) for part in keys] + [grouped @ windows[0].permute(0, 1, 3, 2)], 3)
    seen = mask.reshape(mask.size(0), 1, 1, mask.size(1), mask.size(2))
    by_head = scores.reshape(0, heads, -1, query.size(2), mask.size(2))
    by_row = graph.where(seen, by_head, -np.inf).reshape(scores.shape())
    # A fully masked row has the maximum -inf; replacing it by a finite number makes the row's weights 0 instead of NaN.
    top = by_row.max(3).at_least(LEAST)
    weights = (by_row - top).op("Exp")
    mass = weights.sum(3)
    sizes = [part.tokens() for part in values] + [windows[1].size(2)]
    *of_tiers, of_window = weights.split(3, sizes)
    mixed = of_window @ windows[1]
    for part, share, own in zip(values, of_tiers, of_keys, strict=True):
        mixed = mixed + part.mix(share)
        if part.stream.predicted is not None:
            mixed = mixed + part.stream.predicted.mix(share, own)

    output = (mixed / mass.at_least(TINY)).reshape(query.shape())
    lse = (top + mass.op("Log")).reshape(0, query.size(1), query.size(2))
    graph.output("output", output, ("batch", "heads", "rows", channels))
    graph.output("lse", lse, ("batch", "heads", "rows"))
    return graph


class _Part:
    """Keys or values of a tier, as inputs of the graph.

    `rotated`: keys are stored before RoPE; the graph gets their `cos` and `sin` as inputs.
    """

    def __init__(self, graph: Graph, tier: Tier, stream: Stream, rotated: bool) -> None:
        prefix, self.stream = f"{tier.name}{stream.role}.", stream
        fields = {"exact": tokens_of(stream)} if stream.writer is None else stream.writer.fields()
        self.block = inputs(graph, fields, prefix)
        self.map = stream.map(graph, inputs(graph, stream.numbers(), prefix))
        self.cos_sin: list[Value] = []
        if rotated:
            axes = tuple(f"{prefix}turned.{axis}" for axis in ("batch", "heads"))
            shape = (*axes, f"{prefix}tokens", f"{prefix}half")
            self.cos_sin = [graph.input(f"{prefix}{name}", np.float32, shape) for name in ("cos", "sin")]

    def tokens(self) -> Value:
        """Returns the number of tokens, int64 `[1]`."""
        return next(iter(self.block.values())).size(2)

    def scores(self, query: Value) -> Value:
        """Returns q.k^ of every token, `[batch, kv_heads, rows, tokens]`."""
        writer = self.stream.writer
        if writer is None:
            return query @ self.block["exact"].permute(0, 1, 3, 2)
        if self.cos_sin:
            return query @ _rotated(self.map.inverse(writer.decode(self.block)), *self.cos_sin).permute(0, 1, 3, 2)
        folded, constant = self.map.fold_query(query)
        scores = writer.scores(folded, self.block)
        return scores if constant is None else scores + constant

    def mix(self, weights: Value) -> Value:
        """Returns sum_t p_t v^_t for attention weights p, `[batch, kv_heads, rows, D]`."""
        writer = self.stream.writer
        if writer is None:
            return weights @ self.block["exact"]
        return self.map.fold_output(writer.mix(weights, self.block), weights)


def _rotated(keys: Value, cos: Value, sin: Value) -> Value:
    """Returns keys with half-split RoPE applied to their first 2 n channels, n being the channels of `cos`."""
    half = cos.size(3)
    first, second, rest = keys.part(3, 0, half), keys.part(3, half, half * 2), keys.part(3, half * 2, 2**31 - 1)
    return keys.graph.join([first * cos - second * sin, second * cos + first * sin, rest], 3)
