"""Which decoded tokens have probes for queries: drawn for every layer by itself, and asked for by all layers at once."""

from typing import NamedTuple

from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.seeded_rng import SeededRng

MOST_BLOCKS = 1024  # whose probes are remembered


class LayerProbes(NamedTuple):
    """What the probes of a layer follow from."""

    probes: Probes
    rng: SeededRng

    def of_block(self, block: range) -> tuple[bool, ...]:
        """See `Probes.of_block`."""
        return self.probes.of_block(block.start, len(block), self.rng)


class ProbeRows:
    """The probes of blocks of decoded tokens in all layers that were added, in the order in which they first came."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerProbes] = {}
        self._order: dict[int, int] = {}
        self._of_blocks: dict[range, list[tuple[bool, ...]]] = {}

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)

    def add(self, layer: int, own: LayerProbes) -> None:
        """A layer by its number; one that opens again is the same."""
        if self._layers.get(layer) != own:
            self._layers[layer] = own
            self._order.setdefault(layer, len(self._order))
            self._of_blocks.clear()

    def number_of(self, layer: int) -> int:
        """Which in order a layer is."""
        return self._order[layer]

    def at(self, block: range, token: int) -> tuple[bool, ...]:
        """Whether the query of a `token` of the block is a probe, for each layer."""
        if block not in self._of_blocks:
            if len(self._of_blocks) > MOST_BLOCKS:
                self._of_blocks.clear()
            self._of_blocks[block] = list(zip(*(own.of_block(block) for own in self._layers.values()), strict=True))
        return self._of_blocks[block][token - block.start]
