"""How far outliers stick out: high percentiles of |k| and |v| from a sample of tokens.

No tensor of the artifact: figures for the fit's table.
"""

import torch
from torch import Tensor, distributed, nn

from calib.capture.reservoir import Reservoir
from calib.capture.sample import LayerSample
from calib.statistics.contract import Shape, Statistic

TOKENS = 512
QUANTILE = 0.999


class Tails(Statistic):
    """Per layer, a `Reservoir` of tokens with their keys and values (all KV heads)."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.width = shape.kv_heads * shape.head_dim
        self.layers = nn.ModuleList(Reservoir(TOKENS, 2 * self.width, seed) for _ in range(shape.layers))

    def observe(self, sample: LayerSample) -> None:
        """Offers the layer's tokens; the same ones are kept in every layer."""
        rows = torch.cat([x.transpose(1, 2)[sample.mask].flatten(1) for x in (sample.keys, sample.values)], -1)
        self.layers[sample.layer].add(sample.index[sample.mask], rows)

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def percentiles(self, layer: int) -> tuple[float, float]:
        """The 99.9th percentiles of |k| and |v| in a layer; (0, 0) where it was not seen."""
        rows = self.layers[layer].sample().abs().cpu()
        if not len(rows):
            return 0.0, 0.0
        return kth(rows[:, : self.width]), kth(rows[:, self.width :])

    def merge(self, other: Statistic) -> None:
        """Takes in the samples of another part of the corpus."""
        assert isinstance(other, Tails)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.merge(theirs)

    def synchronise(self, device: torch.device) -> None:
        """Merges the samples of all processes."""
        for mine in self.layers:
            gathered = {}
            for name in ("priority", "rows"):
                part = getattr(mine, name).to(device).contiguous()
                gathered[name] = [torch.empty_like(part) for _ in range(distributed.get_world_size())]
                distributed.all_gather(gathered[name], part)
            # Every process merges them all in the same order, its own among them: into an empty reservoir.
            whole = Reservoir(*mine.rows.shape, mine.seed).to(mine.rows.device)
            for priority, rows in zip(gathered["priority"], gathered["rows"], strict=True):
                whole.merge_rows(priority, rows)
            mine.priority, mine.rows = whole.priority, whole.rows


def kth(x: Tensor) -> float:
    """The QUANTILE of all entries, by sorting (torch.quantile refuses more than 2^24 entries)."""
    flat = x.flatten()
    return float(flat.kthvalue(max(1, round(QUANTILE * flat.numel()))).values)
