"""MiKV's balancer of keys (arXiv:2402.18096, eq. 2-4), which moves part of the keys' outlier channels to the queries.

Tensor: `keys.balancer` b, float32 `[layers, kv_heads, head_dim]`; keys are stored as k * b, and queries are divided by b.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.artifact.tensor_registry import LARGEST, NARROWEST
from calib.statistics.contract import Statistic, largest


class Balancers(Statistic):
    """b = sqrt(max_t |q| / max_t |k|) per channel, after RoPE; the maximum of |q| is also over the KV head's query heads.

    b is 1 if either maximum is 0, and is clamped to the positive numbers of float16, 2^-24 ... 65504.
    """

    reductions = {"queries_max": "max", "keys_max": "max"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        for name in self.reductions:
            self.register_buffer(name, torch.zeros(shape.layers, shape.kv_heads, shape.head_dim, dtype=torch.float32))

    def observe(self, sample: LayerSample) -> None:
        """Updates the layer's maxima."""
        heads = largest(sample.queries, sample.mask).unflatten(0, (sample.keys.shape[1], -1))
        for name, found in (("queries_max", heads.amax(1)), ("keys_max", largest(sample.keys, sample.mask))):
            maximum = getattr(self, name)[sample.layer]
            torch.maximum(maximum, found.to(maximum.device), out=maximum)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the balancers."""
        queries, keys = self.queries_max.cpu(), self.keys_max.cpu()
        # Roots before the division: the quotient of the largest and the smallest float32 would overflow.
        balancer = (queries.sqrt() / keys.sqrt()).clamp(NARROWEST, LARGEST)  # eq. 2
        return {"keys.balancer": torch.where((queries > 0) & (keys > 0), balancer, 1.0)}
