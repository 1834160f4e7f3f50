"""Channel scales of values (ZipCache, arXiv:2405.14256, eq. 6), so that outlier channels do not widen a token's range.

Tensor: `values.scale`, float32 `[layers, kv_heads, head_dim]`.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.artifact.tensor_registry import LEAST_SCALE
from calib.statistics.contract import Statistic, largest


class ChannelScales(Statistic):
    """c = sqrt(max_t |v|) per layer, KV head and channel; 1 if c is below 1e-12, as in a channel that is always 0."""

    reductions = {"values_max": "max"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.register_buffer(
            "values_max", torch.zeros(shape.layers, shape.kv_heads, shape.head_dim, dtype=torch.float32)
        )

    def observe(self, sample: LayerSample) -> None:
        """Updates the layer's maxima."""
        maximum = self.values_max[sample.layer]
        torch.maximum(maximum, largest(sample.values, sample.mask).to(maximum.device), out=maximum)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the scales."""
        scale = self.values_max.cpu().sqrt()  # eq. 6
        return {"values.scale": torch.where(scale >= LEAST_SCALE, scale, 1.0)}
