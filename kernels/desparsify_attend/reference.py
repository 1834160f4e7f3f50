"""Attention over sparsely coded tokens, sums of a few dictionary atoms (CSR, arXiv:2412.11741, eq. 12), in plain torch.

A tier's tokens are stored in pages. Tile by tile, tokens are decoded, keys are rotated to their positions, and the tile is added to
a running softmax. README.md describes what the kernel does instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.reference import RunningSoftmax
from calib.kernels.matching_pursuit.reference import desparsify
from calib.kernels.pack.reference import unpack_bytes

# Most tokens, of all rows together, that are decoded at once.
TILE_TOKENS = 4096


@dataclass(frozen=True)
class SparsePages:
    """Pages of one stream (keys or values) of a tier, and the dictionary that its indices refer to. A pair is (index, coefficient).

    Args:
        indices: `[pages, kv_heads, slots, bytes]` uint8 by `pack_bytes`, or `[pages, kv_heads, slots, pairs]` unsigned int16.
        coefficients: `[pages, kv_heads, slots, pairs]` float16, float32, or the bytes of float8 e4m3 in uint8; with `bits` integer
            codes by `pack_bytes`, `[..., bytes]` uint8.
        sparsity: pairs per vector.
        chunks: vectors per token and head; a token's channels are divided into so many chunks.
        offline: atoms shared by all rows, `[N, D / chunks]`, float16 or float32.
        online: atoms of each row, `[rows, M, D / chunks]`, whose indices begin at N.
        bits: bits of integer coefficients, else None.
        scale: step of integer coefficients, `[pages, kv_heads, slots, 1]`, float16 or float32.

    Raises ValueError if there are no atoms.
    """

    indices: Tensor
    coefficients: Tensor
    sparsity: int
    chunks: int = 1
    offline: Tensor | None = None
    online: Tensor | None = None
    bits: int | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.shared + self.columns == 0:
            raise ValueError("a dictionary has atoms, got offline=None and online=None; pass one of them")

    @property
    def pairs(self) -> int:
        """Pairs per token and head."""
        return self.sparsity * self.chunks

    @property
    def shared(self) -> int:
        """N, number of atoms shared by all rows."""
        return 0 if self.offline is None else len(self.offline)

    @property
    def columns(self) -> int:
        """M, number of atoms of each row."""
        return 0 if self.online is None else self.online.shape[1]

    @property
    def width(self) -> int:
        """Number of channels of an atom."""
        table = self.offline if self.online is None else self.online
        assert table is not None
        return table.shape[-1]

    @property
    def index_bits(self) -> int:
        """Bits of a packed index, enough for N + M atoms; 0 if indices are int16."""
        if self.indices.dtype == torch.int16:
            return 0
        return max(1, (self.shared + self.columns - 1).bit_length())

    def decode(self, pages: Tensor) -> Tensor:
        """Decodes the tokens in `pages`, int32 `[rows, n]`: float32 `[rows, kv_heads, n * slots, D]`."""
        found = self._pairs(self.indices, pages)
        index = found.int() & 0xFFFF if self.index_bits == 0 else unpack_bytes(found, self.index_bits, self.pairs)
        if self.online is not None and len(self.online) > 1:  # the table below has the atoms of all rows
            row = torch.arange(len(self.online), dtype=torch.int32, device=index.device)[:, None, None, None]
            index = torch.where(index >= self.shared, index + row * self.columns, index)
        split = (self.chunks, self.sparsity)
        index, coefficients = (part.unflatten(-1, split) for part in (index, self._coefficients(pages)))
        parts = [part for part in (self.offline, self.online) if part is not None]
        table = torch.cat([part.reshape(-1, self.width).float() for part in parts])
        return desparsify(index, coefficients, table).flatten(-2)

    def _coefficients(self, pages: Tensor) -> Tensor:
        found = self._pairs(self.coefficients, pages)
        if self.bits is not None:
            assert self.scale is not None
            codes = unpack_bytes(found, self.bits, self.pairs) - (2 ** (self.bits - 1) - 1)
            return codes.float() * self._pairs(self.scale, pages).float()
        return found.view(torch.float8_e4m3fn).float() if found.dtype == torch.uint8 else found.float()

    @staticmethod
    def _pairs(field: Tensor, pages: Tensor) -> Tensor:
        """Gathers a field of the pages: `[rows, kv_heads, n * slots, width]`."""
        return field[pages].transpose(1, 2).flatten(2, 3)


def desparsify_attend(
    query: Tensor,
    keys: SparsePages,
    values: SparsePages,
    table: Tensor,
    used: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    back: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attends to one tier's stored tokens; returns `top` and `mass [rows, kv_heads, R]` and `mixed [..., R, D]` of a softmax,
    float32.

    top is the largest logit, mass the sum of exp(logit - top), mixed the sum of exp(logit - top) v. A query row without any visible
    token has the lowest float32 as top, mass 0 and mixed 0.

    Args:
        query: `[rows, kv_heads, R, D]`, times the softmax scale and rotated to its position; the R query rows are group-major,
            columns (new tokens) change fastest.
        keys, values: the stored tokens; values may have another number of channels than D.
        table: pages of each row, int32 `[rows, n]`; pages behind the used slots may be any.
        used: slots in use, int32 `[rows]`.
        cos_sin: float32 `[positions, r / 2]` each, for every position that occurs: keys are stored before RoPE, and channels (i, i
            + r/2) of the first r are rotated to the token's position. None: keys are used as stored.
        positions: position of each token, int32 `[pages, kv_heads, slots, 1]`; None: slot t of a row holds the token at position t.
        softcap: logits become tanh(logit / softcap) softcap.
        back: integers `[rows, columns]`: tokens at this position or before are outside the sliding window of that column's queries.
    """
    softmax, pages = RunningSoftmax(), table.shape[1]
    slots = keys.indices.shape[2]
    step = max(1, TILE_TOKENS // (slots * len(table)))
    for at in range(0, pages, step):
        tile = table[:, at : at + step]
        slot = torch.arange(at * slots, (at + tile.shape[1]) * slots, device=query.device)
        own = slot if positions is None else positions[tile].transpose(1, 2).flatten(2, 4).long()
        # An unused slot may hold anything, even a position that is not in the table of cos and sin.
        missing = (slot >= used[:, None])[:, None]
        own = torch.where(missing, 0, own)
        decoded = keys.decode(tile)
        scores = (
            query.float() @ (decoded if cos_sin is None else _rotated(decoded, *(part[own] for part in cos_sin))).mT
        )
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = missing[:, :, None]
        if back is not None:
            gone = own[:, :, None] <= back[:, None, :, None]
            hidden = hidden | gone.repeat(1, 1, query.shape[2] // back.shape[1], 1)
        softmax.add(softmax.weights(scores.masked_fill(hidden, -torch.inf)) @ values.decode(tile))
    if softmax.top is None or softmax.mass is None or softmax.mixed is None:
        top = query.new_full(query.shape[:3], torch.finfo(torch.float32).min, dtype=torch.float32)
        return top, torch.zeros_like(top), top.new_zeros(*top.shape, values.width * values.chunks)
    return softmax.top[..., 0], softmax.mass[..., 0], softmax.mixed


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE of `keys [rows, kv_heads, n, D]` by `[rows, 1 or kv_heads, n, r/2]`."""
    half = cos.shape[-1]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
