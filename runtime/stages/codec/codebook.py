"""Scalar non-uniform quantisation: a value is the index of the nearest of a few numbers that a table holds for its head.

    i = argmin_j |x - c_j|        x^ = c_i

The table is fitted to samples (`Codebook.of`: k-means in one dimension, KVQuant's nuq datatype, arXiv:2401.18079, section 3.3,
without its sensitivity weights) or given. Indices are packed as in `kernels/pack`, like the codes of `UniformQuant`; no parameters
are stored with them, so a token of D channels takes `bits` D bits, rounded up to 16-bit words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.pack.reference import pack_away, unpack, unpack_columns, words_per_token
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.stages.contract import Codec, Segment

ROUNDS = 300  # most rounds of k-means; it ends when a round moves no entry


@dataclass(frozen=True, eq=False)
class Codebook(Codec):
    """A table of 2, 4, 8, ... 256 rising numbers for each KV head, or one for all.

    Args:
        table: float32 `[kv_heads or 1, 2^bits]`, finite, each row rising.

    A value between two entries is decoded to within half their distance, one beyond the ends to the end (`error_bound`).
    """

    table: Tensor

    def __post_init__(self) -> None:
        entries = self.table.shape[-1] if self.table.ndim == 2 else 0
        if entries not in [2**bits for bits in range(1, 9)] or self.table.dtype != torch.float32:
            raise ValueError(
                "table must be float32 [kv_heads or 1, entries] of 2, 4, 8, ... 256 entries, got "
                f"{printable(self.table.dtype)} {list(self.table.shape)}"
            )
        if not self.table.is_meta and not bool(self.table.isfinite().all() & (self.table.diff(dim=-1) >= 0).all()):
            raise ValueError("table must be finite and rising in each row; sort it")

    @staticmethod
    def of(x: Tensor, bits: int) -> "Codebook":
        """Fits a table for each head to samples `x [batch, kv_heads, tokens, head_dim]`: quantiles, then k-means."""
        if type(bits) is not int or not 1 <= bits <= 8:
            raise ValueError(f"bits must be a whole number 1 ... 8, got {printable(bits)}")
        values = x.float().transpose(0, 1).flatten(1).sort(-1).values  # [kv_heads, n], rising
        if not values.shape[1]:
            raise ValueError("a table needs samples to be fitted to, got none; give at least one token")
        at = (torch.arange(2**bits, dtype=torch.float32, device=x.device) + 0.5) / 2**bits * values.shape[1]
        table = values[:, at.long()]
        for _ in range(ROUNDS):
            index = _nearest(values, table)
            sums = torch.zeros_like(table).scatter_add_(-1, index, values)
            counts = torch.zeros_like(table).scatter_add_(-1, index, torch.ones_like(values))
            # An entry to which no sample is nearest keeps its value.
            means = torch.where(counts > 0, sums / counts.clamp(min=1), table).sort(-1).values
            if torch.equal(means, table):
                break
            table = means
        return Codebook(table)

    @property
    def bits(self) -> int:
        """Width of an index."""
        return (self.table.shape[-1] - 1).bit_length()

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """The packed indices."""
        return {"words": Field(1, words_per_token(head_dim, self.bits), torch.int16, "codes")}

    def fp32_params(self, x: Tensor) -> bool:
        """False: no parameters are stored with the indices."""
        return False

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, head_dim]` -> words int16 `[batch, kv_heads, tokens, W]`."""
        by_head = x.float().transpose(0, 1)
        index = _nearest(by_head.flatten(1), self._tables(len(by_head))).view(by_head.shape)
        return {"words": pack_away(index.transpose(0, 1).to(torch.int16), self.bits)}

    def decode(self, block: Block, channels: int) -> Tensor:
        """float32 `[..., kv_heads, tokens, channels]`."""
        return self._entries(unpack(block["words"], self.bits, channels))

    def error_bound(self, x: Tensor) -> Tensor:
        """Half the distance of the two entries around a value; beyond the ends the distance from the end."""
        by_head = x.float().transpose(0, 1)
        table, values = self._tables(len(by_head)), by_head.flatten(1).contiguous()
        above = torch.searchsorted(table, values).clamp(1, table.shape[-1] - 1)
        half = (table.gather(-1, above) - table.gather(-1, above - 1)) / 2
        outside = (table[:, :1] - values).clamp(min=0) + (values - table[:, -1:]).clamp(min=0)
        return torch.where(outside > 0, outside, half).view(by_head.shape).transpose(0, 1)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """Logits of `query [..., kv_heads, rows, D]` float32 with the decoded keys of a tile."""
        return query @ self._entries(unpack_columns(tile["words"], self.bits, query.shape[-1]))

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """Sums of the decoded values of a tile, weighted by `weights [..., kv_heads, rows, tokens]` float32."""
        return weights @ self._entries(unpack_columns(tile["words"], self.bits, channels)).mT

    def _tables(self, heads: int) -> Tensor:
        """`[heads, entries]`."""
        return self.table.expand(heads, -1).contiguous()

    def _entries(self, index: Tensor) -> Tensor:
        """The entries of `index [..., kv_heads, n, m]`: float32 of its shape."""
        table = self.table.expand(index.shape[-3], -1)
        head = torch.arange(index.shape[-3], device=index.device)[:, None, None]
        return table[head, index.long()]


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """int64 indices of the nearest entries of `table [heads, entries]`, rising, to `values [heads, n]`; of two the upper."""
    middles = (table[:, 1:] + table[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), values.contiguous(), right=True)
