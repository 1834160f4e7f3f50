"""Per-channel ranges of keys (after RoPE) and values, for quantisers with calibrated ranges.

Tensors: `keys.low`, `keys.high`, `values.low`, `values.high`, float32 `[layers, kv_heads, head_dim]`.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.statistics.contract import Statistic, tokens_of


class ChannelRanges(Statistic):
    """low = min_t x, high = max_t x, per layer, KV head and channel, over all tokens of the corpus."""

    reductions = {"keys_low": "min", "keys_high": "max", "values_low": "min", "values_high": "max"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        sizes = (shape.layers, shape.kv_heads, shape.head_dim)
        for name, reduction in self.reductions.items():
            self.register_buffer(
                name, torch.full(sizes, torch.inf if reduction == "min" else -torch.inf, dtype=torch.float32)
            )

    def observe(self, sample: LayerSample) -> None:
        """Widens the layer's ranges."""
        for stream, x in (("keys", sample.keys), ("values", sample.values)):
            tokens = tokens_of(x, sample.mask)
            low, high = getattr(self, f"{stream}_low")[sample.layer], getattr(self, f"{stream}_high")[sample.layer]
            torch.minimum(low, tokens.amin(1).to(low.device), out=low)
            torch.maximum(high, tokens.amax(1).to(high.device), out=high)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the four extremes; 0 in layers without samples."""
        seen = {name: getattr(self, name).cpu() for name in self.reductions}
        return {name.replace("_", "."): torch.where(extreme.isfinite(), extreme, 0.0) for name, extreme in seen.items()}
