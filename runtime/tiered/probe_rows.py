"""Which queries of decoded tokens are probes: drawn for each layer separately, and looked up for all layers at once."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.seeded_rng import SeededRng

MOST_BLOCKS = 1024  # blocks whose probes are cached
NO_BLOCK = range(0)


class LayerProbes(NamedTuple):
    """A layer's probe strategy and random number generator."""

    probes: Probes
    rng: SeededRng

    def of_block(self, block: range) -> tuple[bool, ...]:
        """The probes of a block of decoded tokens, one bool for each (`Probes.of_block`)."""
        return self.probes.of_block(block.start, len(block), self.rng)

    def of_prompt(self, length: int, ids: Tensor | None) -> Tensor:
        """The probes of a prompt (`Probes.of_prompt`). Raises ValueError for special tokens without token ids."""
        if self.probes.strategy == "special" and ids is None:
            raise ValueError("probes='special' needs token ids: call the model with input_ids, not with inputs_embeds")
        return self.probes.of_prompt(length, self.rng, ids)


class ProbeRows:
    """The probes of blocks of decoded tokens in all layers, in the order in which the layers were added."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerProbes] = {}
        self._order: dict[int, int] = {}
        self._of_blocks: dict[range, list[bytes]] = {}
        # By prompt length the newest block and its probes: consecutive tokens are in the same block.
        self._newest: dict[int, tuple[range, list[bytes]]] = {}

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def add(self, layer: int, own: LayerProbes) -> None:
        """Adds a layer by its number; a layer that is opened again keeps its index."""
        if self._layers.get(layer) != own:
            self._layers[layer] = own
            self._order.setdefault(layer, len(self._order))
            self._of_blocks.clear()
            self._newest.clear()

    def number_of(self, layer: int) -> int:
        """The index of a layer in the order of addition."""
        return self._order[layer]

    def at(self, tokens: Iterable[tuple[int, int]], block_of: Callable[[int, int], range]) -> list[bytes]:
        """For each of the `tokens` (position, length of the row's prompt) one byte per layer: 1 if its query is a probe.
        `block_of(position, prompt)` gives the token's block."""
        found, newest, none = list[bytes](), self._newest, (NO_BLOCK, list[bytes]())
        for position, prompt in tokens:
            block, probes = newest.get(prompt, none)
            if position not in block:
                block = block_of(position, prompt)
                probes = self._known(block)
                newest[prompt] = block, probes
            found.append(probes[position - block.start])
        return found

    def _known(self, block: range) -> list[bytes]:
        """For each token of a block one byte per layer; cached."""
        if block not in self._of_blocks:
            if len(self._of_blocks) > MOST_BLOCKS:
                self._of_blocks.clear()
                self._newest.clear()
            of_layers = (own.of_block(block) for own in self._layers.values())
            self._of_blocks[block] = list(map(bytes, zip(*of_layers, strict=True)))
        return self._of_blocks[block]
