"""Converts between blocks in vLLM's paged memory and the codec's chunks.

vLLM 0.32 and 0.33 register one tensor for each layer, `[blocks, heads, tokens of a block, 2 * D]` with any strides (D: head_dim).
A head's part of a block has its keys and its values, `2 * tokens * D` entries, in one of two orders:

    by token    for each token D keys, then D values: FlashAttention, FlashInfer, Triton
    by block    as the CPU's attention packs them, which `cpu_order.py` determines

An attention kernel may need shorter blocks than the scheduler's (vLLM splits them); then block b is a run of such shorter blocks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PagedMemory:
    """The tensors of all layers on one rank.

    Args:
        caches: the tensors by layer name, as given to `register_kv_caches`.
        layers, heads, head_dim: the expected sizes; heads are the rank's KV heads.
        block: tokens of a block of the scheduler.
        order: int64 `[2 * tokens * D]`: indices, within a head's part of a block, of its keys `[tokens, D]` and then of its values;
            None: the order by token.

    Attributes:
        dtype: dtype of keys and values.
        tokens: tokens of a block of the tensors.

    Raises ValueError if the tensors do not have the expected sizes, or not one of `DTYPES`.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        layers: int,
        heads: int,
        head_dim: int,
        block: int,
        order: Tensor | None = None,
    ) -> None:
        numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in caches}
        if sorted(numbers.values()) != [[layer] for layer in range(layers)]:
            raise ValueError(
                f"the engine's memory has {len(caches)} layers, expected {layers}, each with its own keys and values; give this "
                "model's artifact, and no draft model with a cache"
            )
        self._memory = [caches[name] for name in sorted(caches, key=numbers.__getitem__)]
        first = self._memory[0]
        for memory in self._memory:
            shape = tuple(memory.shape)
            if len(shape) != 4 or (shape[1], shape[3]) != (heads, 2 * head_dim) or block % shape[2]:
                raise ValueError(
                    f"a layer's memory is {list(shape)}, expected [blocks, {heads}, tokens, {2 * head_dim}] with tokens that "
                    f"divide {block}; serve a model of plain attention with its own artifact"
                )
            if memory.dtype not in DTYPES or memory.dtype != first.dtype:
                raise ValueError(
                    f"a layer's memory is {memory.dtype}, expected float32, float16 or bfloat16, all alike; serve with "
                    "--kv-cache-dtype auto"
                )
        self.dtype, self.tokens = first.dtype, first.shape[2]
        self._heads, self._head_dim, self._parts = heads, head_dim, block // self.tokens
        if order is None:
            order = by_token(self.tokens, head_dim)
        self._order = order.to(first.device)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """Returns the chunk `[2, layers, tokens, heads * D]` of successive blocks, as a copy in host memory."""
        own, found = self._own(blocks), list[Tensor]()
        for memory in self._memory:
            rows = memory[own].flatten(2)[..., self._order].unflatten(-1, (2, self.tokens, self._head_dim))
            found.append(rows.permute(2, 0, 3, 1, 4).reshape(2, -1, self._heads * self._head_dim).cpu())
        return torch.stack(found, 1)

    @torch.inference_mode()  # the engine's tensors may be inference tensors
    def write(self, blocks: Sequence[int], chunk: Tensor) -> None:
        """Writes a chunk into blocks with as many tokens."""
        own = self._own(blocks)
        for memory, rows in zip(self._memory, chunk.to(self._order.device).unbind(1), strict=True):
            entries = rows.view(2, len(own), self.tokens, self._heads, self._head_dim).permute(1, 3, 0, 2, 4).flatten(2)
            pages = torch.empty_like(entries)
            pages[..., self._order] = entries
            memory[own] = pages.unflatten(-1, (self.tokens, 2 * self._head_dim))

    def _own(self, blocks: Sequence[int]) -> Tensor:
        """Returns the indices of the tensors' blocks that make up the scheduler's blocks."""
        first = torch.tensor(blocks, device=self._order.device)[:, None] * self._parts
        return (first + torch.arange(self._parts, device=first.device)).flatten()


def by_token(tokens: int, head_dim: int) -> Tensor:
    """Returns the order of entries if each token has its keys, then its values."""
    return torch.arange(2 * tokens * head_dim).view(tokens, 2, head_dim).transpose(0, 1).flatten()
