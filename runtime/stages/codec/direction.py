"""Length and direction: a token is its norm times a unit vector whose coordinates are quantised by one table (TurboQuant,
arXiv:2504.19874, algorithm 1).

    n = |x|        i_j = argmin_k |x_j / n - c_k|        x^_j = n c_(i_j)

A coordinate t of a uniformly random direction in D dimensions has a density proportional to (1 - t^2)^((D - 3) / 2): the table is
the one with the least squared error for it (Lloyd-Max), and needs no data. After a random rotation every token is such a direction.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from calib.kernels.to_half import HALF_MAX, stored
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.codec.codebook import Codebook
from calib.runtime.stages.contract import Codec, Segment
from calib.runtime.stages.exact_sums import whole_numbers

ROUNDS = 1000  # most rounds of Lloyd's iteration; it ends when a round moves every entry by less than TOLERANCE
TOLERANCE = 1e-8
GRID = 2**15  # cells of the numeric integration of the density


@dataclass(frozen=True, eq=False)
class Direction(Codec):
    """A norm in 16 bits, and the coordinates by `codebook`.

    Args:
        codebook: table for the coordinates of unit vectors.

    A token of D channels at b bits takes b D bits for its codes, rounded up to 16-bit words, and 16 bits for its norm.
    """

    codebook: Codebook

    @classmethod
    def uniform(cls, channels: int, bits: int) -> "Direction":
        """The codec with the best table for a random direction in `channels` dimensions, at least 2."""
        if type(bits) is not int or not 1 <= bits <= 8:
            raise ValueError(f"bits must be a whole number 1 ... 8, got {printable(bits)}")
        if channels < 2:
            raise ValueError(
                f"a direction has at least 2 channels, got head_dim {channels}; use a method with ranges, such as rtn"
            )
        return cls(Codebook(lloyd_max(channels, bits)))

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The packed indices, and a norm a token in float16 (float32 when `fp32_params`)."""
        norms = Field(1, 1, torch.float32 if fp32_params else torch.float16, "parameters")
        return self.codebook.fields(head_dim, dtype, fp32_params, segment) | {"norms": norms}

    def fp32_params(self, x: Tensor) -> bool:
        """Whether a norm of tokens like `x` is beyond float16."""
        return bool(x.numel()) and bool(norm(x).amax() > HALF_MAX)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]` -> words int16 `[..., tokens, W]` and norms `[..., tokens, 1]`."""
        fp32_params = self.fp32_params(x) if fp32_params is None else fp32_params
        norms = stored(norm(x), fp32_params)
        # A token of zeros has no direction; where float16 rounds the norm to 0 the token is decoded as zeros.
        directions = x.float() / torch.where(norms == 0, 1, norms.float())
        return {**self.codebook.encode(directions), "norms": norms}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        return self.codebook.decode({"words": block["words"]}, channels) * block["norms"].float()

    def error_bound(self, x: Tensor) -> Tensor:
        """The codebook's bound times the norm, plus the rounding of the stored norm."""
        norms = norm(x)
        bound = self.codebook.error_bound(x.float() / torch.where(norms == 0, 1, norms)) * norms
        half = torch.finfo(torch.float16)
        return bound + 2 * half.eps * norms + half.smallest_normal

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits of `query [..., kv_heads, rows, D]` float32 with a tile of keys: those of the directions times the norms."""
        return self.codebook.scores(query, {"words": tile["words"]}) * tile["norms"].float()

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums of a tile's directions weighted by `weights [..., kv_heads, rows, tokens]` float32 times norms."""
        return self.codebook.mix(weights * tile["norms"].float(), {"words": tile["words"]}, channels)


def norm(x: Tensor) -> Tensor:
    """|x| of tokens `[..., tokens, D]`: float32 `[..., tokens, 1]`, exact to 22 bits, the same in any batch."""
    whole, unit = whole_numbers(x)
    return (whole.square_().sum(-1, keepdim=True).sqrt_() * unit).float()


@lru_cache(maxsize=16)
def lloyd_max(channels: int, bits: int) -> Tensor:
    """The table of 2^bits entries with the least squared error for a coordinate of a random direction: float32 `[1, 2^bits]`.

    With t = cos a the density is sin(a)^(D - 2) da, and the integral of t is sin(a)^(D - 1) / (D - 1).
    """
    angles = torch.linspace(torch.pi, 0, GRID + 1, dtype=torch.float64)  # t from -1 to 1
    total, mass = _summed(angles.sin() ** (channels - 2), angles)
    # Start with entries as dense as the cube root of the density of t, the limit for many entries (Panter and Dite, 1951).
    _, density = _summed(angles.sin() ** (channels / 3), angles)
    share = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    table = angles[torch.searchsorted(density, share)].cos()
    for _ in range(ROUNDS):
        edges = torch.cat([table.new_tensor([-1.0]), (table[1:] + table[:-1]) / 2, table.new_tensor([1.0])]).acos()
        below = _between(mass, edges)
        moment = edges.sin() ** (channels - 1) / (channels - 1) / total
        # From -1 to t the integral of t is -moment(t), as it is zero over all.
        means = -moment.diff() / below.diff()
        means = (means - means.flip(0)) / 2
        moved, table = float((means - table).abs().max()), means
        if moved < TOLERANCE:
            break
    return table.float()[None]


def _summed(weight: Tensor, angles: Tensor) -> tuple[float, Tensor]:
    """The integral of `weight` over all `angles`, and its share from the first angle to each, `[GRID + 1]`."""
    sums = torch.cumulative_trapezoid(weight, angles.neg())
    return float(sums[-1]), torch.cat([sums.new_zeros(1), sums]) / sums[-1]


def _between(mass: Tensor, angles: Tensor) -> Tensor:
    """The cumulative `mass` at `angles`, interpolated linearly between grid points."""
    at = (1 - angles / torch.pi) * GRID
    low = at.floor().clamp(0, GRID - 1).long()
    return mass[low] + (mass[low + 1] - mass[low]) * (at - low)
