"""Means and second moments of keys, values and queries, from which the bases of `klt` are computed.

They are no tensors of the artifact; `transform_basis.py` uses them. Shapes: S streams (`transformed_streams.py`), L layers, H KV
heads, D = head_dim.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.rotation import Rotation
from calib.statistics.contract import Statistic, tokens_of
from calib.statistics.transformed_streams import coded, streams, unrotated, vectors


class SecondMoments(Statistic):
    """For every layer the number of tokens n; for every layer and KV head, sum x and sum x x^T of each stream, sum q q^T over the
    group's query heads, and sum v k^T with keys before RoPE.

    A sequence's first tokens are left out. The moments are float64 `[layers, kv_heads, head_dim, head_dim]`: three of streams, two
    of queries (after and before RoPE), one of values by keys; 134 MB each for Llama 2 7B (32 layers, 32 KV heads of 128 channels).

    Args:
        shape: the model's sizes.
        rotation: the model's RoPE; None if it cannot be unrotated.
    """

    reductions = {"tokens": "sum", "total": "sum", "square": "sum", "queries": "sum", "cross": "sum"}

    def __init__(self, shape: Shape, rotation: Rotation | None) -> None:
        super().__init__()
        self.rotation, self.group = rotation, shape.heads // shape.kv_heads
        count, per_head = len(streams(rotation)), (shape.layers, shape.kv_heads, shape.head_dim)
        self.register_buffer("tokens", torch.zeros(shape.layers, dtype=torch.int64))
        self.register_buffer("total", torch.zeros(count, *per_head, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(count, *per_head, shape.head_dim, dtype=torch.float64))
        self.register_buffer("cross", torch.zeros(*per_head, shape.head_dim, dtype=torch.float64))
        self.register_buffer("queries", torch.zeros(count - 1, *per_head, shape.head_dim, dtype=torch.float64))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's tokens, without a sequence's first ones."""
        real, layer = coded(sample), sample.layer
        self.tokens[layer] += real.sum().to(self.tokens.device)
        every = [tokens_of(x, real).double() for x in vectors(sample, self.rotation)]
        for number, rows in enumerate(every):
            self.total[number, layer] += rows.sum(1).to(self.total.device)
            self.square[number, layer] += (rows.mT @ rows).to(self.square.device)
        if self.rotation is not None:
            _, values, before = every
            self.cross[layer] += (values.mT @ before).to(self.cross.device)
        asked = [sample.queries]
        if self.rotation is not None:
            asked.append(unrotated(sample.queries, sample.positions, self.rotation))
        for number, x in enumerate(asked):
            rows = tokens_of(x, real).double().unflatten(0, (-1, self.group)).flatten(1, 2)
            self.queries[number, layer] += (rows.mT @ rows).to(self.queries.device)

    def tensors(self) -> dict[str, Tensor]:
        """Returns no tensors."""
        return {}

    def mean(self) -> Tensor:
        """Returns the streams' means: float64 `[S, L, H, D]`, on the CPU; 0 in layers without samples."""
        return self.total.cpu() / self._count()[:, None, None]

    def covariance(self) -> Tensor:
        """Returns the streams' covariances: float64 `[S, L, H, D, D]`, on the CPU."""
        mean = self.mean()
        return self.square.cpu() / self._count()[:, None, None, None] - mean[..., None] * mean[..., None, :]

    def values_by_keys(self) -> Tensor:
        """Returns E[(v - mean) (k - mean)^T] with keys before RoPE: float64 `[L, H, D, D]`, on the CPU."""
        _, values, before = self.mean()
        return self.cross.cpu() / self._count()[:, None, None, None] - values[..., None] * before[..., None, :]

    def asked(self) -> Tensor:
        """Returns E[q q^T] of queries after RoPE, and before it if S is 3: float64 `[S - 1, L, H, D, D]`, on the CPU."""
        return self.queries.cpu() / (self.group * self._count())[:, None, None, None]

    def _count(self) -> Tensor:
        return self.tokens.cpu().clamp(min=1)
