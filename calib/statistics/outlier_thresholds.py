"""Calibrated outlier thresholds, with which GEAR's outliers (arXiv:2403.05527, eq. 4) are found without sorting the prompt.

Float32 tensors for n shares s: `outliers.shares` [n], and for keys (after RoPE) and values the quantiles s/2 (`low`) and
1 - s/2 (`high`) of all entries of a channel, of a head and of a layer: `{stream}.outliers.channel.low`
[layers, kv_heads, head_dim, n], `{stream}.outliers.head.low` [layers, kv_heads, n], `{stream}.outliers.layer.low`
[layers, n], and the same with `high`.

They are computed from a sample of tokens, which `fit/metrics.py` reads as well.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from calib.capture.reservoir import Reservoir
from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.statistics.layer_samples import LayerSamples

TOKENS = 2048
SHARES = (0.02, 0.05, 0.1)


class OutlierThresholds(LayerSamples):
    """Per layer, a `Reservoir` of tokens with their keys and values (all KV heads); thresholds are computed from it at the end.

    Args:
        shape: the model's sizes.
        seed: of the sample.
        shares: increasing shares of outliers, both ends together, each above 0 and below 1.

    Raises UsageError for other shares.
    """

    def __init__(self, shape: Shape, seed: int, shares: Sequence[float] = SHARES) -> None:
        super().__init__()
        stored = torch.tensor(shares, dtype=torch.float32)  # what must increase is what the artifact holds
        if not len(shares) or not bool(((stored > 0) & (stored < 1)).all()) or not bool((stored.diff() > 0).all()):
            raise UsageError(
                f"model.outlier_shares={list(shares)}: increasing numbers above 0 and below 1, such as [0.02, 0.1]"
            )
        self.shares, self.heads, self.channels = tuple(shares), shape.kv_heads, shape.head_dim
        width = 2 * shape.kv_heads * shape.head_dim
        self.layers = nn.ModuleList(Reservoir(TOKENS, width, seed) for _ in range(shape.layers))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's tokens to the sample; the same tokens are kept in every layer."""
        rows = torch.cat([x.transpose(1, 2)[sample.mask].flatten(1) for x in (sample.keys, sample.values)], -1)
        self.layers[sample.layer].add(sample.index[sample.mask], rows)

    def tokens(self, layer: int) -> dict[str, Tensor]:
        """Returns the layer's sampled `keys` and `values`, each float32 `[tokens, kv_heads, head_dim]`, on the CPU."""
        found = self.layers[layer].sample().cpu().unflatten(-1, (2, self.heads, self.channels))
        return {"keys": found[:, 0], "values": found[:, 1]}

    def tensors(self) -> dict[str, Tensor]:
        """Returns shares and thresholds; thresholds are 0 in layers without samples."""
        by_layer: dict[str, list[Tensor]] = {}
        for layer in range(len(self.layers)):
            for stream, x in self.tokens(layer).items():
                channels = x.permute(1, 2, 0)  # [kv_heads, head_dim, tokens]
                for part, entries in (
                    ("channel", channels),
                    ("head", channels.flatten(1)),
                    ("layer", channels.flatten()),
                ):
                    for end, threshold in zip(("low", "high"), thresholds(entries, self.shares), strict=True):
                        by_layer.setdefault(f"{stream}.outliers.{part}.{end}", []).append(threshold)
        return {
            "outliers.shares": torch.tensor(self.shares, dtype=torch.float32),
            **{name: torch.stack(x) for name, x in by_layer.items()},
        }


def thresholds(x: Tensor, shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns the quantiles s/2 and 1 - s/2 of each row of `x [..., N]`: two tensors `[..., len(shares)]`; 0 if N is 0.

    They are entries of the row: if all N differ, floor(s N / 2) entries are below `low`, and as many above `high`.
    """
    entries = x.shape[-1]
    if not entries:
        return (x.new_zeros(*x.shape[:-1], len(shares)),) * 2
    positions = torch.tensor([math.floor(share * entries / 2) for share in shares])
    ordered = x.sort(-1).values  # torch.quantile refuses more than 2^24 entries
    return ordered[..., positions], ordered[..., entries - 1 - positions]
