"""The base class of statistics that are computed from a uniform sample of tokens: a `Reservoir` for each layer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from calib.statistics.contract import Statistic


class LayerSamples(Statistic):
    """A statistic with one `Reservoir` per layer in `layers`; merging is exact, in any order."""

    layers: nn.ModuleList

    def merge(self, other: Statistic) -> None:
        """Merges the samples of another part of the corpus into these."""
        assert isinstance(other, LayerSamples)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.merge(theirs)

    def merge_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Merges another part's buffers, given by name; its samples must have the same seed."""
        for number, mine in enumerate(self.layers):
            mine.merge_rows(buffers[f"layers.{number}.priority"], buffers[f"layers.{number}.rows"])

    def synchronise(self, device: torch.device) -> None:
        """Merges the samples of all processes, exchanged on `device`."""
        for mine in self.layers:
            mine.synchronise(device)

    def clear(self) -> None:
        """Empties the samples."""
        for mine in self.layers:
            mine.clear()
