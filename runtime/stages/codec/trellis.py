"""Trellis-coded levels for the components of a calibrated basis: at the same bits, a step half as wide.

A component of b bits has 2^(b+1) levels in [-1, 1], as a uniform code of b + 1 bits has (`mixed.py`):

    s = 2^-b        y^ = s i - 1 + s / 2        i = 4 f + 2 z1 + z0

and which half of them it may take follows from the bits before it (`kernels/trellis`). Stored are the b bits u + 2 f. One path goes
through all components of a token and head, word by word, and in a word from the first field; it begins in state 0 for every
token. So a token's code depends on nothing else, and of a word a reader needs the one or two before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.attend.products import number_mix, number_scores, turned_number_scores
from calib.kernels.components.operation import components
from calib.kernels.components.projection import Projection
from calib.kernels.trellis.operation import trellis_levels, trellis_words
from calib.runtime.paging.field import Block
from calib.runtime.stages.codec.word_codes import WordCodes


@dataclass(frozen=True, eq=False)
class TrellisQuant(WordCodes):
    """Trellis-coded levels.

    Args:
        widths: bits of a word's fields.
        counts: words of each KV head.
        weights: float32 `[kv_heads, 1, components]`: what an error of 1 in y counts, from 0; 0 for a component that its head has no
            word for.
    """

    weights: Tensor

    has_kernel = True
    onnx_writer = "trellis"
    piece = 2**18  # of a component there are the errors of four subsets, and the ways into eight states

    @property
    def level_bits(self) -> tuple[int, ...]:
        """One more than a field has: twice as many levels."""
        return tuple(width + 1 for width in self.widths)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """y `[batch, kv_heads, tokens, components]` -> words int16 `[batch, 1, tokens, all words]`."""
        return {"words": trellis_words(x.float(), self.widths, self.counts, self.step_weights(x.device))}

    def projected(
        self, x: Tensor, projection: Projection, weights: Tensor | None = None
    ) -> tuple[Block, Tensor | None]:
        """One launch for components, and one for the paths through them."""
        y, numbers = components(x, projection, self.widths, self.counts, weights)
        return self.encode(y), numbers

    def decode(self, block: Block, channels: int) -> Tensor:
        """y^ float32 `[..., kv_heads, tokens, components]`."""
        codes = self.codes({"words": block["words"].mT}).mT
        return codes * self.step(codes.device) + self.least(codes.device)

    def codes(self, tile: Block) -> Tensor:
        """The indices of the levels of a tile: int16 `[..., kv_heads, components, tokens]`."""
        return trellis_levels(tile["words"], self.widths, self.counts)

    def error_bound(self, x: Tensor) -> Tensor:
        """What half of the levels errs by, from any state, is what the best path errs by at most in all: a component's share of
        that may be all of it. Of one that counts nothing, nothing is known."""
        step = self.step(x.device)
        greedy = (x.float().abs() - 1).clamp(min=0) + 1.5 * step
        whole = (greedy * self.weights).square().sum(-1, keepdim=True).sqrt()
        bound = whole * (1 + 2**-10) / self.weights
        return bound.masked_fill(self.weights == 0, torch.inf)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, components]` float32 -> logits `[..., kv_heads, rows, tokens]` from the codes."""
        folded, zero = query * self.step(query.device), (query * self.least(query.device)).sum(-1, keepdim=True)
        return number_scores(folded, self.codes(tile)) + zero

    def turned_scores(
        self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """Keys are `matrix [kv_heads, D, components + 1]` times the codes and 1; with `sizes` s there are `components + 2` columns,
        for s c, s and 1."""
        return turned_number_scores(query, self.codes(tile), matrix, cos, sin, sizes)

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times the codes themselves."""
        return number_mix(weights, self.codes(tile))

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream:
        """As uniform codes lie."""
        words = pages["words"]
        fixed = self.step(words.device), self.least(words.device)
        return PackedStream(self.widths, words, channels, fixed=fixed, counts=self.counts, trellis=True)

    def step_weights(self, device: torch.device) -> Tensor:
        """Weights of squared steps `[kv_heads, components]`, the largest of a head 1 at most."""
        relative = self.weights / self.weights.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return (relative * self.step(device)).square().squeeze(1)
