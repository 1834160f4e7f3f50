"""Determines the order of entries in a block of vLLM's CPU attention, which differs by processor and dtype.

vLLM's own operation writes a block in which every entry has a unique bit pattern; the positions of the patterns in the block are
the order.
"""

import torch
from torch import Tensor
from vllm import _custom_ops

WORDS = {2: torch.int16, 4: torch.int32}


def cpu_order(instructions: str, tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the `order` argument of `PagedMemory`, int64 `[2 * tokens * head_dim]`.

    Args:
        instructions: the attention layer's `isa`.
        tokens: tokens of a block.
        head_dim: the model's head_dim.
        dtype: dtype of keys and values, 16 or 32 bits.

    Raises ValueError if the operation does not store every entry unchanged, or if a block has more entries than bit patterns.
    """
    count, words = 2 * tokens * head_dim, WORDS[dtype.itemsize]
    marks = torch.arange(count).to(words)  # large numbers wrap around but remain unique
    keys, values = marks.view(dtype).view(2, tokens, 1, head_dim)
    block = torch.zeros(1, 1, 2 * tokens, head_dim, dtype=dtype)
    _custom_ops.cpu_attn_reshape_and_cache(keys, values, *block.chunk(2, dim=2), torch.arange(tokens), instructions)
    found = block.view(words).flatten().long() % 2 ** (8 * dtype.itemsize)
    order = found.argsort()
    if not torch.equal(found[order], torch.arange(count)):
        raise ValueError(
            f"vLLM's CPU attention ({instructions}, {dtype}, blocks of {tokens} tokens) does not store entries unchanged, or has "
            "more entries in a block than the dtype has bit patterns; serve with another --dtype or a smaller --block-size"
        )
    return order
