"""Where vLLM's CPU attention puts the entries of a block: asked of vLLM, as it differs by processor and dtype.

A block is written by vLLM's own operation, every entry with a pattern of bits of its own. Where a pattern is found again, its entry
lies.
"""

import torch
from torch import Tensor
from vllm import _custom_ops

WORDS = {2: torch.int16, 4: torch.int32}


def cpu_order(instructions: str, tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """As `PagedMemory` takes it.

    Args:
        instructions: what the attention layer calls its `isa`.
        tokens: of a block.
        head_dim: of the model.
        dtype: of keys and values, 16 or 32 bits.

    Raises ValueError where the operation does not store every entry as it is.
    """
    count, words = 2 * tokens * head_dim, WORDS[dtype.itemsize]
    marks = torch.arange(count).to(words)  # what is above half of the range wraps around, and differs still
    keys, values = marks.view(dtype).view(2, tokens, 1, head_dim)
    block = torch.zeros(1, 1, 2 * tokens, head_dim, dtype=dtype)
    _custom_ops.cpu_attn_reshape_and_cache(keys, values, *block.chunk(2, dim=2), torch.arange(tokens), instructions)
    found = block.view(words).flatten().long() % 2 ** (8 * dtype.itemsize)
    order = found.argsort()
    if not torch.equal(found[order], torch.arange(count)):
        raise ValueError(
            f"vLLM's CPU attention ({instructions}, {dtype}, blocks of {tokens} tokens) does not store entries as they are, or has "
            "more of them in a block than their bits tell apart; serve with another --dtype or a smaller --block-size"
        )
    return order
