"""A low-rank approximation of a quantisation residual, as two thin factors (GEAR, arXiv:2403.05527, eq. 6)."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.low_rank.reference import NARROW, low_rank_mix, low_rank_scores, power_iteration
from calib.kernels.to_half import stored
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Segment
from calib.runtime.stages.seeded_rng import SeededRng

# Rounds of the power iteration: the paper's, and those that cost no more where a segment is short or a matrix narrow. With three
# not every block of 20 tokens comes within 5 % of the least error (tests/runtime/test_gear_errors.py).
ROUNDS, CHEAP_ROUNDS = 3, 12
FIXED = SeededRng(0, 0)


@dataclass(frozen=True, eq=False)
class LowRank:
    """R ~ A B^T of each head's residual `[T, D]` in a segment: r coefficients for every token, r vectors for the segment.

    Args:
        rank: r; a float is the share of min(T, D), at least 1. Never more than T or D.
        across_heads: one matrix `[T, heads D]`, whose coefficients all heads share (GEAR as its paper writes it).
        basis: the artifact's basis, float32 `[kv_heads, r, D]` orthonormal: then there is no iteration, tokens are encoded
            independently, and only coefficients are stored.
        rng: random numbers from which the iteration starts.
    """

    rank: float | int
    across_heads: bool = False
    basis: Tensor | None = None
    rng: SeededRng = FIXED

    def __post_init__(self) -> None:
        whole, share = type(self.rank) is int and self.rank >= 1, type(self.rank) is float and 0 < self.rank <= 1
        if not whole and not share:
            raise ValueError(
                f"rank must be a whole number from 1, or a share (0 ... 1] of min(T, D), got {printable(self.rank)}"
            )
        if self.basis is not None and not (whole and self.rank <= self.basis.shape[-2]):
            raise ValueError(
                f"rank must be a whole number from 1 to the {self.basis.shape[-2]} vectors of the artifact's basis, "
                f"got {printable(self.rank)}"
            )

    @property
    def joins_heads(self) -> bool:
        """Whether all heads share coefficients."""
        return self.across_heads

    def of_segment(self, tokens: int, width: int) -> int:
        """The rank r for a segment of `tokens` x `width`."""
        if self.basis is not None:
            return int(self.rank)
        least = min(tokens, width)
        # 1e-9: a product such as .29 * 100 must not lose one to rounding.
        return min(least, self.rank if type(self.rank) is int else max(1, math.floor(self.rank * least + 1e-9)))

    def fields(self, head_dim: int, fp32_params: bool, segment: Segment) -> dict[str, Field]:
        """`coefficients [T, r]` for each token and, unless the artifact has it, `basis [r D]` for the segment."""
        width = head_dim * (segment.heads if self.across_heads else 1)
        rank, dtype = self.of_segment(segment.tokens, width), torch.float32 if fp32_params else torch.float16
        fields = {"coefficients": Field(1, rank, dtype, "low_rank", shared=self.across_heads)}
        if self.basis is None:
            fields["basis"] = Field(None, rank * head_dim, dtype, "low_rank")
        return fields

    def encode(self, residual: Tensor, fp32_params: bool) -> Block:
        """Factors of `residual [1, kv_heads, T, D]`, float32.

        Coefficients `[1, kv_heads or 1, T, r]`, basis `[1, kv_heads, 1, r D]`.
        """
        if self.basis is not None:
            return {
                "coefficients": stored(
                    residual @ stored(self.basis[:, : int(self.rank)], False).float().mT, fp32_params
                )
            }
        heads, (tokens, channels) = residual.shape[1], residual.shape[2:]
        matrix = residual.transpose(1, 2).flatten(2)[:, None] if self.across_heads else residual
        start = self._start(matrix.shape[1], matrix.shape[3], self.of_segment(tokens, matrix.shape[3]), residual.device)
        # Coefficients are computed with the basis as it is stored, which compensates its rounding.
        rounds = CHEAP_ROUNDS if tokens <= matrix.shape[3] or matrix.shape[3] <= NARROW else ROUNDS
        basis = stored(power_iteration(matrix, start, rounds), fp32_params)
        vectors = basis.unflatten(2, (-1, channels))  # [1, 1 or heads, 1 or heads, D, r]: one of the two is 1
        by_head = vectors.flatten(1, 2) if self.across_heads else basis
        assert by_head.shape[1] == heads
        return {
            "coefficients": stored(matrix @ basis.float(), fp32_params),
            "basis": by_head.mT.flatten(2)[:, :, None].contiguous(),
        }

    def decode(self, block: Block, channels: int) -> Tensor:
        """A B^T, float32 `[..., kv_heads, T, D]`."""
        coefficients, basis = block["coefficients"].float(), self._bases(block, channels)
        segments = basis.shape[-2]
        parts = coefficients.unflatten(-2, (segments, -1))  # [..., S, n, r]
        return (parts @ basis.unflatten(-1, (-1, channels))).flatten(-3, -2)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """(q B) A^T."""
        return low_rank_scores(query, self._basis_tile(tile, query.shape[-1]), tile["coefficients"])

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """(p A) B^T."""
        return low_rank_mix(weights, self._basis_tile(tile, channels), tile["coefficients"], channels)

    def vectors(self, tile: Block, channels: int) -> Tensor:
        """B of a tile of one segment as it is stored, `[rows or 1, kv_heads, r, D]`."""
        if self.basis is not None:
            held = self.basis[:, : int(self.rank)]
            return (held if held.dtype == torch.float16 else stored(held, False))[None]
        return tile["basis"][..., 0].unflatten(-1, (-1, channels))

    def with_seed(self, seed: int, layer: int) -> "LowRank":
        """The same with the start of the iteration drawn for `seed` and `layer`."""
        return replace(self, rng=SeededRng(seed, layer))

    def _bases(self, block: Block, channels: int) -> Tensor:
        if self.basis is None:
            return block["basis"].float()
        return stored(self.basis[:, : int(self.rank)], False).float().flatten(1)[:, None]

    def _basis_tile(self, tile: Block, channels: int) -> Tensor:
        return tile["basis"] if self.basis is None else self._bases(tile, channels).mT

    def _start(self, heads: int, width: int, rank: int, device: torch.device) -> Tensor:
        """Random numbers in [-1, 1), `[heads, width, rank]`; those of a head do not depend on the number of heads."""
        positions = torch.arange(width * rank, device=device)
        return (self.rng.of_heads(heads, positions).double() / 2**31 - 1).float().view(heads, width, rank)
