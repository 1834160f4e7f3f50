"""Statistics that are read off a uniform sample: a `Reservoir` for each layer."""

import torch
from torch import nn

from calib.statistics.contract import Statistic


class LayerSamples(Statistic):
    """A statistic whose `layers` are one `Reservoir` each: samples merge exactly, in whatever order."""

    layers: nn.ModuleList

    def merge(self, other: Statistic) -> None:
        """Takes in the samples of another part of the corpus."""
        assert isinstance(other, LayerSamples)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.merge(theirs)

    def synchronise(self, device: torch.device) -> None:
        """Merges the samples of all processes."""
        for mine in self.layers:
            mine.synchronise(device)

    def clear(self) -> None:
        """Empties the samples."""
        for mine in self.layers:
            mine.clear()
