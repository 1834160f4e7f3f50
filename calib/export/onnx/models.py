"""Builds the checked ONNX models of one layer from a method's options and an artifact."""

import json
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from calib import __version__
from calib.export.onnx.attention import attend_graph
from calib.export.onnx.graph import OPSET, Graph
from calib.export.onnx.parts import Layer, check_written, layer_of
from calib.export.onnx.shape import Shape
from calib.export.onnx.stream_graphs import stream_graphs
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods import Geometry, build, options_asked
from calib.runtime.store import LayerContext


@dataclass(frozen=True)
class Request:
    """A method with its options, artifact and model shape.

    Args:
        method, options: as `compress` takes them.
        artifact: None if the method needs none.
        artifact_sha256: of the artifact's file, for the models' metadata; empty without an artifact.
        geometry: layers, KV heads and channels, of the model or of the artifact.
        seed: the cache's seed, which decides where power iterations start.
        fp32_params: parameters (scales and the like) are float32, as in the runtime for tokens beyond float16's range.
    """

    method: str
    options: dict[str, Any]
    artifact: Artifact | None
    artifact_sha256: str
    geometry: Geometry
    seed: int = 0
    fp32_params: bool = False

    def layer(self, number: int) -> Layer:
        """Returns the stages of attention layer `number`; raises ValueError for options that do not fit, or have no graph."""
        geometry = self.geometry
        check_written(self.method)
        plan = build(self.method, self.options).plan(number, geometry, self.artifact)
        plan.check(geometry.head_dim, torch.float32)
        shape = Shape(geometry.kv_heads, geometry.head_dim)
        return layer_of(plan, shape, self.fp32_params, LayerContext(number, self.seed), self.method)

    def models(self, number: int) -> dict[str, onnx.ModelProto]:
        """Returns the layer's models by file name without suffix: `layer0.keys.encode`, `layer0.tier1.values.decode`, ..."""
        layer, found = self.layer(number), {}
        for tier in layer.tiers:
            for stream in (tier.keys, tier.values):
                for kind, graph in stream_graphs(stream).items():
                    name = f"{tier.name}{stream.role}.{kind}"
                    found[name] = self._model(graph, number, name, layer)
        found["attend"] = self._model(attend_graph(layer), number, "attend", layer)
        return {f"layer{number}.{name}": model for name, model in found.items()}

    def _model(self, graph: Graph, number: int, name: str, layer: Layer) -> onnx.ModelProto:
        metadata = {
            "calib.version": __version__,
            "calib.opset": str(OPSET),
            "calib.graph": name,
            "calib.layer": str(number),
            "calib.method": self.method,
            "calib.options": json.dumps(options_asked(build(self.method, self.options)), sort_keys=True),
            "calib.keys": "before RoPE" if layer.before_rope else "after RoPE",
            "calib.seed": str(self.seed),
            "calib.artifact.sha256": self.artifact_sha256,
        }
        return graph.model(name.replace(".", "_"), metadata, "calib", __version__)
