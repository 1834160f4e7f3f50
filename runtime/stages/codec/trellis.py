"""Trellis-coded levels for the components of a calibrated basis: at the same bits, a step half as wide.

A component of b bits has 2^(b+1) levels in [-1, 1], as a uniform code of b + 1 bits has (`mixed.py`):

    s = 2^-b        y^ = s i - 1 + s / 2        i = 4 f + 2 z1 + z0

and the bits of earlier components determine which half of them it may use (`kernels/trellis`). The b bits u + 2 f are stored. One
path goes through all components of a token and head, word by word, and in a word from the first field; it starts in state 0 for
every token. So tokens are encoded independently, and to decode a word only the one or two words before it are needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.attend.products import number_mix, number_scores, rotated_number_scores
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
        weights: float32 `[kv_heads, 1, components]`, from 0: the weight of an error in y; 0 for a component for which its head has
            no word.
    """

    weights: Tensor

    has_kernel = True
    onnx_writer = "trellis"
    piece = 2**18  # temporaries are large: for each component errors of four subsets, and transitions into eight states

    @property
    def level_bits(self) -> tuple[int, ...]:
        """One more than the field's width: there are twice as many levels."""
        return tuple(width + 1 for width in self.widths)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """y `[batch, kv_heads, tokens, components]` -> words int16 `[batch, 1, tokens, all words]`."""
        return {"words": trellis_words(x.float(), self.widths, self.counts, self.step_weights(x.device))}

    def projected(
        self, x: Tensor, projection: Projection, weights: Tensor | None = None
    ) -> tuple[Block, Tensor | None]:
        """One kernel launch for components and sizes, and one for the search of paths."""
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
        """A path that takes the nearest allowed level errs by at most 1.5 steps (plus the distance beyond [-1, 1]) in each
        component, and the best path has no larger weighted error in all; a single component may have all of that. Infinite for
        weight 0."""
        step = self.step(x.device)
        greedy = (x.float().abs() - 1).clamp(min=0) + 1.5 * step
        whole = (greedy * self.weights).square().sum(-1, keepdim=True).sqrt()
        bound = whole * (1 + 2**-10) / self.weights
        return bound.masked_fill(self.weights == 0, torch.inf)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, components]` float32 -> logits `[..., kv_heads, rows, tokens]` from the codes."""
        folded, zero = query * self.step(query.device), (query * self.least(query.device)).sum(-1, keepdim=True)
        return number_scores(folded, self.codes(tile)) + zero

    def rotated_scores(
        self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """As in `ComponentCodes`: keys are `matrix [kv_heads, D, components + 1]` times the levels' indices c and 1; with `sizes` s
        the matrix has `components + 2` columns, for s c, s and 1."""
        return rotated_number_scores(query, self.codes(tile), matrix, cos, sin, sizes)

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """Sums of the levels' indices weighted by `weights [..., kv_heads, rows, tokens]` float32."""
        return number_mix(weights, self.codes(tile))

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream:
        """The words in the layout of uniform codes, marked as trellis codes."""
        words = pages["words"]
        fixed = self.step(words.device), self.least(words.device)
        return PackedStream(self.widths, words, channels, fixed=fixed, counts=self.counts, trellis=True)

    def step_weights(self, device: torch.device) -> Tensor:
        """The squares of each component's weight, relative to the head's largest, times its step: `[kv_heads, components]`."""
        relative = self.weights / self.weights.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return (relative * self.step(device)).square().squeeze(1)
