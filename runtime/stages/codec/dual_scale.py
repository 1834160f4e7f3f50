"""Two scales for each value, its token's and its channel's: uniform quantisation of tiles that are scaled to equal variance (KVarN,
arXiv:2606.03458).

    along="channels":    x^_tc = s_t (q_tc S_c + Z_c)        along="tokens":    x^_tc = s_c (q_tc S_t + Z_t)

A tile is `tile` tokens t of a head with channels c. `equal_variance` finds scales of its tokens and of its channels; those of the
axis other than `along` are stored as s, and x / s is rounded to the nearest of 2^bits levels between the ends of each channel, or
of each token. Dividing all of a channel (token) by its scale would not change its codes, so these scales are not stored.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from calib.kernels.to_half import stored
from calib.runtime.messages.printable import printable
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Codec, Segment
from calib.runtime.stages.equal_variance import LEAST_SCALE, MOST_SIDE, row_scales

MOST_ROUNDS = 1000


@dataclass(frozen=True, eq=False)
class DualScale(Codec):
    """Codes, a scale S and zero point Z for each channel (token) of a tile, and s for each token (channel), all in float16.

    Bits a value with D channels, b bits and a tile of g tokens: b + 32/g + 16/D along channels, b + 32/D + 16/g along tokens.

    Args:
        bits: width of a code, 1 ... 8.
        along: "channels" (KVarN's keys) or "tokens" (its values): the axis whose entries each have one S and Z.
        tile: tokens that are normalised together, 2 ... 512.
        iterations: rounds of the normalisation, 0 ... 1000; 0 leaves s at 1.
    """

    bits: int
    along: Literal["channels", "tokens"]
    tile: int = 128
    iterations: int = 16

    piece = 2**18
    asks_extremes = True

    def __post_init__(self) -> None:
        if self.along not in ("channels", "tokens"):
            raise ValueError(f"along must be channels or tokens, got {printable(self.along)}")
        check_whole("tile", self.tile, 2, "a whole number of tokens, 2 ... 512", "; 128 is usual", MOST_SIDE)
        check_whole("iterations", self.iterations, 0, "a whole number 0 ... 1000", "; 16 is usual", MOST_ROUNDS)
        UniformQuant(self.bits)

    @property
    def uniform(self) -> UniformQuant:
        """The quantiser of x / s."""
        return UniformQuant(self.bits, (self.tile, 1) if self.along == "channels" else (1, None))

    def token_group(self) -> int:
        """The tokens of a tile."""
        return self.tile

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """`words` and `parameters` as `UniformQuant` has them, and `scales`: s, float16 (float32 when `fp32_params`)."""
        fields = self.uniform.fields(head_dim, dtype, fp32_params)
        each, width = (1, 1) if self.along == "channels" else (self.tile, head_dim)
        return fields | {"scales": Field(each, width, fields["parameters"].dtype, "parameters")}

    def fp32_params(self, x: Tensor) -> bool:
        """Whether S or Z of tokens like `x` could be beyond float16: x / s is up to e^0.3 times as large."""
        return self.uniform.fp32_params(x.float() / LEAST_SCALE)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]`, whole tiles -> words int16 `[..., tokens, W]`; along channels parameters
        `[..., tiles, 2 D]` and scales `[..., tokens, 1]`, along tokens `[..., tokens, 2]` and `[..., tiles, D]`."""
        fp32_params = self.fp32_params(x) if fp32_params is None else fp32_params
        tiles = self._tiles(x.float())
        scales = self._scales(tiles, fp32_params)
        block = self.uniform.encode((tiles / scales.float()).flatten(-3, -2), fp32_params)
        return {**block, "scales": scales.flatten(-3, -2)}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        tiles = self._tiles(self.uniform.decode(block, channels))
        return (tiles * block["scales"].float().unflatten(-2, (tiles.shape[-3], -1))).flatten(-3, -2)

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of `UniformQuant` for x / s, times s."""
        tiles = self._tiles(x.float())
        scales = self._scales(tiles, True)
        bound = self._tiles(self.uniform.error_bound((tiles / scales).flatten(-3, -2)))
        return (bound * scales).flatten(-3, -2)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits of `query [..., kv_heads, rows, D]` float32; s multiplies the logits or, along tokens, the query for each tile."""
        if self.along == "channels":
            return self.uniform.scores(query, tile) * tile["scales"].float()
        block, scales = self._by_tile(tile)
        return self.uniform.scores(query * scales, block).movedim(0, -2).flatten(-2)

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums by `weights [..., kv_heads, rows, tokens]` float32; s multiplies the weights or, along tokens, each tile's sum."""
        if self.along == "channels":
            return self.uniform.mix(weights * tile["scales"].float(), tile, channels)
        block, scales = self._by_tile(tile)
        own = weights.unflatten(-1, (-1, self.tile)).movedim(-2, 0)
        return (self.uniform.mix(own, block, channels) * scales).sum(0)

    def _tiles(self, x: Tensor) -> Tensor:
        """`[..., tokens, D]` as `[..., tiles, g, D]`."""
        if x.shape[-2] % self.tile:
            raise ValueError(f"tiles of {self.tile} tokens do not divide {x.shape[-2]} tokens; give whole tiles")
        return x.unflatten(-2, (x.shape[-2] // self.tile, self.tile))

    def _scales(self, tiles: Tensor, fp32_params: bool) -> Tensor:
        """s of `tiles [..., g, D]`, as it is stored: `[..., g, 1]` along channels, `[..., 1, D]` along tokens."""
        if self.along == "channels":
            return stored(row_scales(tiles, self.iterations).float(), fp32_params)
        return stored(row_scales(tiles.mT, self.iterations).float(), fp32_params).mT

    def _by_tile(self, block: Block) -> tuple[Block, Tensor]:
        """For `along="tokens"`: the words `[tiles, ..., W, g]` and parameters of a block with tokens last, by tile of g tokens; and
        s `[tiles, ..., 1, D]`."""
        own = {name: block[name].unflatten(-1, (-1, self.tile)).movedim(-2, 0) for name in ("words", "parameters")}
        return own, block["scales"].float().movedim(-1, 0).unsqueeze(-2)
