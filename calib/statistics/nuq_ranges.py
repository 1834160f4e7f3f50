"""Ranges of keys before RoPE without their outliers (KVQuant, arXiv:2401.18079, sections 3.1, 3.2 and 3.4).

Float32 tensors for n shares s: `nuq.shares` [n]; `keys.nuq.low`, `keys.nuq.high` [layers, kv_heads, head_dim, n], the quantiles s/2
and 1 - s/2 of each channel of the keys, unrotated to position 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from calib.capture.reservoir import Reservoir
from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.runtime.artifact.nuq_tensors import NUQ_SHARES
from calib.runtime.rotation import Rotation
from calib.statistics.layer_samples import LayerSamples
from calib.statistics.outlier_thresholds import thresholds
from calib.statistics.transformed_streams import unrotated

TOKENS = 2048


class NuqRanges(LayerSamples):
    """Per layer, a `Reservoir` of tokens with their keys before RoPE (all KV heads); ranges are computed from it at the end.

    A sequence's first token, which stays exact, is left out. Each layer's sample has 2,048 tokens in float32: 1.1 GB in all for
    Llama 2 7B.

    Args:
        shape: the model's sizes.
        seed: of the sample.
        shares: increasing shares of outliers, both ends together, each from 0 and below 1.
        rotation: the model's RoPE; None if only the options are to be checked.

    Raises UsageError for other shares.
    """

    def __init__(self, shape: Shape, seed: int, shares: Sequence[float], rotation: Rotation | None) -> None:
        super().__init__()
        stored = torch.tensor(shares, dtype=torch.float32)  # what must increase is what the artifact holds
        if not bool(((stored >= 0) & (stored < 1)).all()) or not bool((stored.diff() > 0).all()):
            raise UsageError(f"model.nuq={list(shares)}: increasing numbers from 0 and below 1, such as [0.01]")
        self.shares, self.rotation = tuple(shares), rotation
        self.heads, self.channels = shape.kv_heads, shape.head_dim
        width = shape.kv_heads * shape.head_dim
        self.layers = nn.ModuleList(Reservoir(TOKENS, width, seed) for _ in range(shape.layers))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's keys to the sample; the same tokens are kept in every layer."""
        assert self.rotation is not None
        keys, kept = unrotated(sample.keys, sample.positions, self.rotation), sample.mask & (sample.numbers > 0)
        self.layers[sample.layer].add(sample.index[kept], keys.transpose(1, 2)[kept].flatten(1))

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns `low` and `high` of a layer, `[kv_heads, head_dim, n]`, on the CPU; 0 in layers without samples."""
        keys = self.layers[layer].sample().cpu().unflatten(-1, (self.heads, self.channels))
        return thresholds(keys.permute(1, 2, 0), self.shares)

    def tensors(self) -> dict[str, Tensor]:
        """Returns shares and ranges."""
        low, high = (torch.stack(end) for end in zip(*map(self.of_layer, range(len(self.layers))), strict=True))
        return {NUQ_SHARES: torch.tensor(self.shares, dtype=torch.float32), "keys.nuq.low": low, "keys.nuq.high": high}
