"""Tokens through a transform and a codec."""

from dataclasses import replace
from typing import cast

from torch import Tensor

from calib.kernels.quantise.operation import Before
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Block, ChannelMap, Codec, Transform
from calib.runtime.stages.transform import Basis


def encoded(transform: Transform, codec: Codec, tokens: Tensor, wide: bool, order: Tensor | None = None) -> Block:
    """`tokens [rows, kv_heads, T, head_dim]`, or those at `order` int64 `[rows, kv_heads, n]` of them, as a block.

    A uniform codec's kernel gathers and transforms while it quantises; tokens are written once, packed.
    """
    if isinstance(codec, UniformQuant) and not isinstance(transform, Basis):
        return codec.encode(tokens, wide, replace(cast(ChannelMap, transform).before(), order=order))
    return codec.encode(transform.forward(Before(order=order).gathered(tokens)), wide)
