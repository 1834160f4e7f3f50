"""A sample of each layer's key and value vectors, by which layers are compared and on which dictionaries are trained.

CSR (arXiv:2412.11741) approximates the vector of one token and KV head at a time; keys before RoPE, because after it they
depend on the position.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from calib.capture.reservoir import LAST, Reservoir
from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.rotation import Rotation
from calib.statistics.layer_samples import LayerSamples
from calib.statistics.transformed_streams import unrotated


class VectorSamples(LayerSamples):
    """Per layer, a `Reservoir` of vectors of single KV heads: in each row a key before RoPE and the value beside it.

    Vectors are numbered `token * kv_heads + head` in every layer, so all layers keep the same ones and equally many: the
    divergence of two layers depends on how many vectors are compared. Layers without samples keep none.

    Each layer's sample has `capacity` rows of 2 head_dim numbers in `dtype`. The model's own dtype loses nothing, and with 16
    bits takes half the memory of float32: 537 MB for Llama 2 7B (32 layers, 32768 vectors of 128 channels), as much in each
    checkpoint.

    Args:
        shape: the model's sizes.
        seed: of the sample.
        capacity: vectors of each layer, at least 1.
        dtype: of the sample: the model's.
        rotation: returns the model's RoPE, to unrotate keys of models whose keys before RoPE cannot be captured (fused
            projections, for instance); called when first needed.
    """

    def __init__(
        self, shape: Shape, seed: int, capacity: int, dtype: torch.dtype, rotation: Callable[[], Rotation]
    ) -> None:
        super().__init__()
        self.heads, self.make_rotation = shape.kv_heads, rotation
        self.rotation: Rotation | None = None
        self.layers = nn.ModuleList(Reservoir(capacity, 2 * shape.head_dim, seed, dtype) for _ in range(shape.layers))

    def observe(self, sample: LayerSample) -> None:
        """Adds every head's key and value of the real tokens to the sample."""
        keys = sample.keys_before_rope
        if keys is None:
            self.rotation = self.rotation or self.make_rotation()
            # A constant factor on rotated keys (YaRN's) stays in; atoms have unit length, so it changes only coefficients.
            keys = unrotated(sample.keys, sample.positions, self.rotation).to(sample.keys.dtype)
        rows = torch.cat([x.transpose(1, 2)[sample.mask] for x in (keys, sample.values)], -1).flatten(0, 1)
        index = sample.index[sample.mask][:, None] * self.heads + torch.arange(self.heads, device=rows.device)
        self.layers[sample.layer].add(index.flatten(), rows)

    def reached(self) -> list[int]:
        """Returns the layers that have vectors."""
        return [number for number, layer in enumerate(self.layers) if layer.priority[0] < LAST]

    def vectors(self, layer: int) -> dict[str, Tensor]:
        """Returns the layer's `keys` and `values`, float32 `[vectors, head_dim]`, on the CPU; the same vectors in every layer."""
        keys, values = self.layers[layer].sample().cpu().float().chunk(2, -1)
        return {"keys": keys.contiguous(), "values": values.contiguous()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns no tensors: the sample is no part of the artifact."""
        return {}
