"""Tokens through a transform and a codec."""

from dataclasses import replace

from torch import Tensor

from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Block, Codec, Transform


def encoded(transform: Transform, codec: Codec, tokens: Tensor, wide: bool, order: Tensor | None = None) -> Block:
    """`tokens [rows, kv_heads, T, head_dim]`, or those at `order` int64 `[rows, kv_heads, n]` of them, as a block.

    A uniform codec's kernel gathers and transforms while it quantises; tokens are written once, packed.
    """
    before = replace(transform.before(), order=order)
    if isinstance(codec, UniformQuant):
        return codec.encode(tokens, wide, before)
    return codec.encode(before.forward(tokens), wide)
