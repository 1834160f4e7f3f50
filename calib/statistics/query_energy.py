"""Mean square of queries per channel, the weight of an error in that channel of a key for the logits.

Tensor: `queries.mean_square`, float32 `[layers, kv_heads, head_dim]`.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.statistics.contract import Statistic, tokens_of


class QueryEnergy(Statistic):
    """mean over tokens and the KV head's query heads of q^2, after RoPE; sums in float64."""

    reductions = {"total": "sum", "count": "sum"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(shape.layers, shape.kv_heads, shape.head_dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(shape.layers, dtype=torch.int64))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's squares."""
        squares = tokens_of(sample.queries, sample.mask).double().square().sum(1)
        group = squares.unflatten(0, (sample.keys.shape[1], -1))
        self.total[sample.layer] += group.sum(1).to(self.total.device)
        self.count[sample.layer] += int(sample.mask.sum()) * group.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the means; 0 in layers without samples."""
        mean = self.total.cpu() / self.count.cpu().clamp(min=1)[:, None, None]
        return {"queries.mean_square": mean.float()}
