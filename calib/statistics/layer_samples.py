"""Statistics that are read off a uniform sample: a `Reservoir` for each layer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from calib.statistics.contract import Statistic


class LayerSamples(Statistic):
    """A statistic whose `layers` are one `Reservoir` each: samples merge exactly, in whatever order."""

    layers: nn.ModuleList

    def merge(self, other: Statistic) -> None:
        """Takes in the samples of another part of the corpus."""
        assert isinstance(other, LayerSamples)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.merge(theirs)

    def merge_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Takes in the buffers of another part's samples, of the same seed."""
        for number, mine in enumerate(self.layers):
            mine.merge_rows(buffers[f"layers.{number}.priority"], buffers[f"layers.{number}.rows"])

    def synchronise(self, device: torch.device) -> None:
        """Merges the samples of all processes."""
        for mine in self.layers:
            mine.synchronise(device)

    def clear(self) -> None:
        """Empties the samples."""
        for mine in self.layers:
            mine.clear()
