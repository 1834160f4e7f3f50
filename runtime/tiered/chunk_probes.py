"""Which queries of a row are probes, where tokens are stored in chunks: those of the prompt, and those drawn for later chunks."""

from itertools import accumulate

import torch
from torch import Tensor

from calib.runtime.stages.tiering import RatioTiers
from calib.runtime.tiered.probe_rows import MOST_BLOCKS, LayerProbes


class ChunkProbes:
    """The probes of one layer. Positions are indices of tokens in their row; `prompt` is the length of the row's first forward."""

    def __init__(self, own: LayerProbes, tiering: RatioTiers) -> None:
        self.own, self.tiering = own, tiering
        self._blocks: dict[range, tuple[bool, ...]] = {}

    def of_prompt(self, length: int, ids: Tensor | None) -> Tensor:
        """The probes of a prompt by the strategy; a prompt shorter than a first chunk uses that chunk's. int64 on the host."""
        first = self.tiering.first(0)
        if length >= first:
            return self.own.of_prompt(length, ids)
        return torch.tensor([position for position in range(length) if self._block(range(first))[position]]).long()

    def among(self, start: int, stop: int, prompt: int, ids: Tensor | None) -> list[bool]:
        """For each query at positions [start, stop) whether it is a probe."""
        chosen: list[bool] = []
        while start < stop:
            chunk = self.tiering.chunk_of(start, prompt)
            if chunk == range(prompt):
                positions = set(self.own.of_prompt(prompt, ids).tolist())
                chosen += [position in positions for position in range(start, min(stop, prompt))]
            else:
                chosen += self._block(chunk)[start - chunk.start : stop - chunk.start]
            start = chunk.stop
        return chosen

    def seeing(self, chunk: range, prompt: int, ids: Tensor | None, observed: Tensor | None) -> Tensor:
        """How many probes see each token of a chunk, those at its position and later: int64 `[len(chunk)]` on the host.
        `observed` are the prompt's probes, where this forward is the prompt."""
        if self.tiering.chunk_of(chunk.start, prompt) == range(prompt):
            probes = self.own.of_prompt(prompt, ids) if observed is None else observed
            return len(probes) - torch.searchsorted(probes, torch.arange(chunk.start, chunk.stop))
        chosen = self.among(chunk.start, chunk.stop, prompt, ids)
        return torch.tensor(list(accumulate(map(int, reversed(chosen))))[::-1])

    def _block(self, chunk: range) -> tuple[bool, ...]:
        """The probes of a chunk after the prompt, one bool for each token; cached."""
        if chunk not in self._blocks:
            if len(self._blocks) > MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[chunk] = self.own.of_block(chunk)
        return self._blocks[chunk]
