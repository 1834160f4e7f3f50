"""Codes of different widths for the components of a calibrated basis; no parameters are stored with them.

A token's components y are in units of their ranges, [-1, 1]; the step s of a b-bit code is a power of two:

    s = 2^(1 - b)        c = clamp(round(y / s + (2^b - 1) / 2), 0, 2^b - 1)        y^ = s c - 1 + s / 2.

Codes are packed as in `kernels/pack`: all words of a layer's stream have the same fields; heads may have different numbers of
words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.attend.products import code_mix, code_scores, rotated_code_scores
from calib.kernels.components.operation import component_words
from calib.kernels.components.projection import Projection
from calib.kernels.pack.heads import join_heads, spread_heads
from calib.kernels.pack.reference import pack_away, unpack, unpack_columns
from calib.kernels.upload import upload
from calib.runtime.paging.field import Block
from calib.runtime.stages.codec.word_codes import WordCodes


@dataclass(frozen=True)
class MixedQuant(WordCodes):
    """Uniform codes of components, with a fixed step for each width."""

    has_kernel = True
    onnx_writer = "words"
    piece = 2**18  # components in float64 are four times as large as tokens

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """y `[batch, kv_heads, tokens, components]` -> words int16 `[batch, 1, tokens, all words]`."""
        return {"words": join_heads(pack_away(self.nearest(x), self.widths), self.counts)}

    def projected(
        self, x: Tensor, projection: Projection, weights: Tensor | None = None
    ) -> tuple[Block, Tensor | None]:
        """One kernel launch for components, sizes and words."""
        words, numbers = component_words(x, projection, self.widths, self.counts, weights)
        return {"words": words}, numbers

    def nearest(self, x: Tensor) -> Tensor:
        """The codes of y `[..., components]`, int16."""
        most = self.levels(x.device)
        codes = (x / self.step(x.device)).add_(most / 2).round_().clamp_(min=0)
        return torch.minimum(codes, most, out=codes).to(torch.int16)

    def decode(self, block: Block, channels: int) -> Tensor:
        """y^ float32 `[..., kv_heads, tokens, components]`."""
        words = spread_heads(block["words"].mT, self.counts).mT
        return unpack(words, self.widths, self.components) * self.step(words.device) + self.least(words.device)

    def rotated_scores(
        self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """As in `ComponentCodes`: keys are `matrix [kv_heads, D, components + 1]` times the codes c and 1; with `sizes` s the
        matrix has `components + 2` columns, for s c, s and 1."""
        return rotated_code_scores(query, tile["words"], self.widths, self.counts, matrix, cos, sin, sizes)

    def codes(self, tile: Block) -> Tensor:
        """The codes of a tile: int16 `[..., kv_heads, components, tokens]`."""
        return unpack_columns(spread_heads(tile["words"], self.counts), self.widths, self.components)

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step, plus the distance beyond [-1, 1]; infinite for a component for which its head has no word."""
        eps = torch.finfo(torch.float32).eps
        bound = (x.float().abs() - 1).clamp(min=0) + self.step(x.device) / 2 + eps
        word = torch.arange(self.components, device=x.device) % max(self.counts)
        missing = word >= upload(list(self.counts), torch.int64, x.device)[:, None, None]
        return bound.masked_fill(missing, torch.inf)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, components]` float32 -> logits `[..., kv_heads, rows, tokens]` from the codes."""
        folded, zero = query * self.step(query.device), (query * self.least(query.device)).sum(-1, keepdim=True)
        return code_scores(folded, tile["words"], self.widths, self.counts) + zero

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """Sums of the codes themselves weighted by `weights [..., kv_heads, rows, tokens]` float32."""
        return code_mix(weights, tile["words"], self.widths, self.components, self.counts)

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream:
        """The words of all heads, which are stored next to each other, and the fixed steps."""
        words = pages["words"]
        fixed = self.step(words.device), self.least(words.device)
        return PackedStream(self.widths, words, channels, fixed=fixed, counts=self.counts)
