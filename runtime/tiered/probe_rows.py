"""Which decoded tokens have probes for queries: drawn for every layer by itself, and asked for by all layers at once."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from calib.runtime.stages.saliency import Probes
from calib.runtime.stages.seeded_rng import SeededRng

MOST_BLOCKS = 1024  # whose probes are remembered
NO_BLOCK = range(0)


class LayerProbes(NamedTuple):
    """What the probes of a layer follow from."""

    probes: Probes
    rng: SeededRng

    def of_block(self, block: range) -> tuple[bool, ...]:
        """See `Probes.of_block`."""
        return self.probes.of_block(block.start, len(block), self.rng)

    def of_prompt(self, length: int, ids: Tensor | None) -> Tensor:
        """See `Probes.of_prompt`; refuses special tokens where nobody gave their ids."""
        if self.probes.strategy == "special" and ids is None:
            raise ValueError("probes='special' needs token ids: call the model with input_ids, not with inputs_embeds")
        return self.probes.of_prompt(length, self.rng, ids)


class ProbeRows:
    """The probes of blocks of decoded tokens in all layers that were added, in the order in which they first came."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerProbes] = {}
        self._order: dict[int, int] = {}
        self._of_blocks: dict[range, list[bytes]] = {}
        # By the length of a row's prompt its newest block: consecutive tokens are in the same.
        self._newest: dict[int, tuple[range, list[bytes]]] = {}

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)

    def add(self, layer: int, own: LayerProbes) -> None:
        """A layer by its number; one that opens again is the same."""
        if self._layers.get(layer) != own:
            self._layers[layer] = own
            self._order.setdefault(layer, len(self._order))
            self._of_blocks.clear()
            self._newest.clear()

    def number_of(self, layer: int) -> int:
        """Which in order a layer is."""
        return self._order[layer]

    def at(self, tokens: Iterable[tuple[int, int]], block_of: Callable[[int, int], range]) -> list[bytes]:
        """For each of the `tokens`, by its position and how long its row's prompt was, a byte for every layer: 1 where its query is
        a probe; `block_of` says which block such a token belongs to."""
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
        """Of each token of a block a byte for every layer; remembered."""
        if block not in self._of_blocks:
            if len(self._of_blocks) > MOST_BLOCKS:
                self._of_blocks.clear()
                self._newest.clear()
            of_layers = (own.of_block(block) for own in self._layers.values())
            self._of_blocks[block] = list(map(bytes, zip(*of_layers, strict=True)))
        return self._of_blocks[block]
