"""Codes of different widths for the components of a calibrated basis; no number is stored beside them.

A token's y is in units of its components' ranges, [-1, 1], which codes divide in steps of a power of two:

    s = 2^(1 - b)        c = clamp(round(y / s + (2^b - 1) / 2), 0, 2^b - 1)        y^ = s c - 1 + s / 2.

Words lie as `kernels/pack` says: all words of a layer's stream have the same fields, and heads differ in how many they have.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from calib.kernels.attend.operation import PackedStream
from calib.kernels.attend.products import code_mix, code_scores, turned_scores
from calib.kernels.pack.heads import join_heads, spread_heads
from calib.kernels.pack.reference import pack_away, unpack, unpack_columns
from calib.runtime.device.graph_inputs import upload
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Codec, Segment


@dataclass(frozen=True)
class MixedQuant(Codec):
    """`widths` of a word's fields, and `counts` of words a token for each KV head.

    y comes in plane form: component p W + w is field p of word w, W being the most words of any head; a head with fewer has
    nothing in the others.
    """

    widths: tuple[int, ...]
    counts: tuple[int, ...]

    has_kernel = True
    piece = 2**18  # components in float64 are four times as large as tokens

    @property
    def component_codes(self) -> "MixedQuant":
        """Itself."""
        return self

    @property
    def components(self) -> int:
        """Of y."""
        return len(self.widths) * max(self.counts)

    def token_group(self) -> int:
        """Every token stands alone."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The words of all heads, side by side."""
        return {"words": Field(1, sum(self.counts), torch.int16, "codes", shared=True)}

    def fp32_params(self, x: Tensor) -> bool:
        """No: there is no parameter."""
        return False

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """y `[batch, kv_heads, tokens, components]` -> words int16 `[batch, 1, tokens, all words]`."""
        most = self.levels(x.device)
        codes = (x / self.step(x.device)).add_(most / 2).round_().clamp_(min=0)
        codes = torch.minimum(codes, most, out=codes).to(torch.int16)
        return {"words": join_heads(pack_away(codes, self.widths), self.counts)}

    def decode(self, block: Block, channels: int) -> Tensor:
        """y^ float32 `[..., kv_heads, tokens, components]`."""
        words = spread_heads(block["words"].mT, self.counts).mT
        return unpack(words, self.widths, self.components) * self.step(words.device) + self.least(words.device)

    def turned_scores(
        self, query: Tensor, tile: Block, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """Keys are `matrix [kv_heads, D, components + 1]` times the codes and 1; with `sizes` s there are `components + 2` columns,
        for s c, s and 1."""
        return turned_scores(query, tile["words"], self.widths, self.counts, matrix, cos, sin, sizes)

    def codes(self, tile: Block) -> Tensor:
        """The codes of a tile: int16 `[..., kv_heads, components, tokens]`."""
        return unpack_columns(spread_heads(tile["words"], self.counts), self.widths, self.components)

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step, and what lies beyond [-1, 1]; of a component that its head has no word for, nothing is known."""
        eps = torch.finfo(torch.float32).eps
        bound = (x.float().abs() - 1).clamp(min=0) + self.step(x.device) / 2 + eps
        word = torch.arange(self.components, device=x.device) % max(self.counts)
        missing = word >= upload(list(self.counts), torch.int64, x.device)[:, None, None]
        return bound.masked_fill(missing, torch.inf)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """`query [..., kv_heads, rows, components]` float32 -> logits `[..., kv_heads, rows, tokens]` from the codes."""
        folded, zero = query * self.step(query.device), (query * self.least(query.device)).sum(-1, keepdim=True)
        return code_scores(folded, tile["words"], self.widths, self.counts) + zero

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 -> `[..., kv_heads, rows, components]` from the codes."""
        mixed = self.mixed_codes(weights, tile) * self.step(weights.device)
        return mixed + weights.sum(-1, keepdim=True) * self.least(weights.device)

    def mixed_codes(self, weights: Tensor, tile: Block) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times the codes themselves."""
        return code_mix(weights, tile["words"], self.widths, self.components, self.counts)

    def packed(self, pages: Block, channels: int, shared: Block) -> PackedStream:
        """Words of all heads side by side, and fixed steps."""
        words = pages["words"]
        fixed = self.step(words.device), self.least(words.device)
        return PackedStream(self.widths, words, channels, fixed=fixed, counts=self.counts)

    def levels(self, device: torch.device) -> Tensor:
        """The largest code of each component: float32 `[components]`."""
        return of_widths(self.widths, max(self.counts), device)[0]

    def step(self, device: torch.device) -> Tensor:
        """The distance of two codes: float32 `[components]`."""
        return of_widths(self.widths, max(self.counts), device)[1]

    def least(self, device: torch.device) -> Tensor:
        """What a code of 0 is: float32 `[components]`."""
        return of_widths(self.widths, max(self.counts), device)[2]


@lru_cache
def of_widths(widths: tuple[int, ...], words: int, device: torch.device) -> Tensor:
    """Of components in plane form, of so many `words` with fields of these `widths`: the largest code, the step, and what a code of
    0 is, float32 `[3, components]`."""
    each = [width for width in widths for _ in range(words)]
    most, step = [2.0**width - 1 for width in each], [2.0 ** (1 - width) for width in each]
    return upload([most, step, [one / 2 - 1 for one in step]], torch.float32, device)
