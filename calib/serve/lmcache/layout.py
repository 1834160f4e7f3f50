"""Where keys and values of a chunk lie in the memory that LMCache hands over.

LMCache describes a chunk by shapes and dtypes. Three of its layouts are of keys and values of plain attention:

    [2, layers, tokens, kv_heads * D]       keys, then values: engines that store them apart
    [1, layers, tokens, kv_heads * 2 * D]   packed: of each head a token's D keys, then its D values (vLLM 0.32); LMCache copies
    [layers, tokens, kv_heads * 2 * D]      the same, and the engine copies

vLLM's CPU attention packs a block of tokens and not each: of a head's `block * 2 * D` entries the first half are keys `[D, block]`,
the second values `[block, D]`. LMCache takes them for rows of tokens as they come, so `cpu_block` says it. It is the form
for float16 and float32 on x86; bfloat16 on processors with AMX has another one, which is not read here.

A chunk that is read in a wrong layout has keys that fit no start (`starts.py`), and is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layout:
    """Of one chunk.

    Args:
        shape: of the tensor, one of the three above.
        dtype: of keys and values.
        layers, tokens, heads, head_dim: what it has.
        block: tokens that are packed together, on a CPU; 1 where each is packed; None where keys and values lie apart.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layers: int
    tokens: int
    heads: int
    head_dim: int
    block: int | None

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        layers: int,
        head_dim: int,
        cpu_block: int | None = None,
    ) -> "Layout":
        """Raises ValueError for what is not keys and values of all `layers` in one tensor of one of the layouts."""
        if len(shapes) != 1 or len(dtypes) != 1:
            raise ValueError(
                f"the chunk has {len(shapes)} tensors, expected one of all layers alike; serve such a model without serde calib"
            )
        (shape,), (dtype,) = [tuple(int(n) for n in one) for one in shapes], dtypes
        if dtype not in DTYPES:
            raise ValueError(
                f"the chunk is {dtype}, expected float32, float16 or bfloat16; give the engine a KV cache of 16 bits"
            )
        packed = len(shape) == 3 or (len(shape) == 4 and shape[0] == 1)
        unit = 2 * head_dim if packed else head_dim
        wanted = f"[2, {layers}, tokens, heads * {head_dim}] or [1, {layers}, tokens, heads * {2 * head_dim}]"
        if not (packed or (len(shape) == 4 and shape[0] == 2)) or shape[-3] != layers or shape[-1] % unit or 0 in shape:
            raise ValueError(f"the chunk has shape {list(shape)}, expected {wanted}; give the artifact of this model")
        block = (cpu_block or 1) if packed else None
        if shape[-2] % (block or 1):
            raise ValueError(
                f"the chunk has {shape[-2]} tokens, expected a multiple of cpu_block={block}; give the engine's block size"
            )
        return cls(shape, dtype, layers, shape[-2], shape[-1] // unit, head_dim, block)

    def read(self, tensor: Tensor) -> Tensor:
        """The codec's chunk `[2, layers, tokens, heads * D]` of a tensor of this layout; a view where keys and values lie apart."""
        if self.block is None:
            return tensor
        # A block of one token has its keys [D, 1] and its values [1, D] as well.
        blocks = self._by_block(tensor).transpose(2, 3).flatten(3)
        keys, values = blocks.chunk(2, -1)
        keys = keys.unflatten(-1, (self.head_dim, self.block)).mT
        values = values.unflatten(-1, (self.block, self.head_dim))
        return torch.stack([keys, values]).transpose(3, 4).reshape(self.chunk_shape)

    def write(self, tensor: Tensor, chunk: Tensor) -> None:
        """The way back: a chunk into `tensor`."""
        if self.block is None:
            tensor.copy_(chunk)
            return
        keys, values = chunk.view(2, self.layers, -1, self.block, self.heads, self.head_dim).transpose(3, 4)
        blocks = torch.cat([keys.mT.flatten(3), values.flatten(3)], -1)
        self._by_block(tensor).copy_(blocks.unflatten(-1, (self.block, 2 * self.head_dim)).transpose(2, 3))

    @property
    def chunk_shape(self) -> tuple[int, int, int, int]:
        """Of the codec's chunk."""
        return 2, self.layers, self.tokens, self.heads * self.head_dim

    def _by_block(self, tensor: Tensor) -> Tensor:
        """`[layers, blocks, block, heads, 2 * D]`, the same memory."""
        assert self.block is not None
        return tensor.view(self.layers, -1, self.block, self.heads, 2 * self.head_dim)
