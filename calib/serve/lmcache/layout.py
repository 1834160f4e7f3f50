"""Converts between LMCache's memory layouts of a chunk and the codec's.

LMCache describes a chunk by shapes and dtypes. Three of its layouts hold keys and values of plain attention (D: head_dim):

    [2, layers, tokens, kv_heads * D]       keys, then values: engines that store them separately
    [1, layers, tokens, kv_heads * 2 * D]   packed: for each head a token's D keys, then its D values (vLLM 0.32); LMCache copies
    [layers, tokens, kv_heads * 2 * D]      the same, if the engine copies

vLLM's CPU attention packs a block of tokens: of a head's `block * 2 * D` entries the first half are keys `[D, block]`, the second
half values `[block, D]`. LMCache treats them as rows of tokens, so the option `cpu_block` must give the block size. This is the
layout for float16 and float32 on x86; bfloat16 on processors with AMX has another one, which is not supported here.

A chunk that is read with a wrong layout has keys that fit no start (`starts.py`), and is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layout:
    """The layout of one chunk.

    Args:
        shape: shape of the tensor, one of the three of this module's docstring.
        dtype: dtype of keys and values.
        layers, tokens, heads, head_dim: the chunk's sizes.
        block: tokens that are packed together on a CPU; 1 if each token is packed; None if keys and values are separate.
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
        """Returns the layout for LMCache's shapes and dtypes.

        Raises ValueError unless they are one tensor with keys and values of all `layers` in one of the layouts.
        """
        if len(shapes) != 1 or len(dtypes) != 1:
            raise ValueError(
                f"the chunk has {len(shapes)} tensors, expected one tensor of all layers; serve such a model without serde calib"
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
        """Converts a tensor of this layout to the codec's chunk `[2, layers, tokens, heads * D]`; without packing, returns the
        tensor itself."""
        if self.block is None:
            return tensor
        # The code covers packed single tokens too: a block of one token has keys [D, 1] and values [1, D].
        blocks = self._by_block(tensor).transpose(2, 3).flatten(3)
        keys, values = blocks.chunk(2, -1)
        keys = keys.unflatten(-1, (self.head_dim, self.block)).mT
        values = values.unflatten(-1, (self.block, self.head_dim))
        return torch.stack([keys, values]).transpose(3, 4).reshape(self.chunk_shape)

    def write(self, tensor: Tensor, chunk: Tensor) -> None:
        """Writes a chunk of the codec into `tensor`, which has this layout."""
        if self.block is None:
            tensor.copy_(chunk)
            return
        keys, values = chunk.view(2, self.layers, -1, self.block, self.heads, self.head_dim).transpose(3, 4)
        blocks = torch.cat([keys.mT.flatten(3), values.flatten(3)], -1)
        self._by_block(tensor).copy_(blocks.unflatten(-1, (self.block, 2 * self.head_dim)).transpose(2, 3))

    @property
    def chunk_shape(self) -> tuple[int, int, int, int]:
        """Shape of the codec's chunk."""
        return 2, self.layers, self.tokens, self.heads * self.head_dim

    def _by_block(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` as a view `[layers, blocks, block, heads, 2 * D]`."""
        assert self.block is not None
        return tensor.view(self.layers, -1, self.block, self.heads, 2 * self.head_dim)
