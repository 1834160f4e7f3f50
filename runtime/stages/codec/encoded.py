"""Tokens through a transform and a codec."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from calib.kernels.quantise.operation import Before
from calib.runtime.stages.codec.mixed import MixedQuant
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Block, ChannelMap, Codec, Transform
from calib.runtime.stages.transform import Basis

# Values at once on a CPU: so many that what is made of them on the way, of components in float64, stays near its cores.
PIECE: dict[type, int] = {UniformQuant: 2**20, MixedQuant: 2**18}


def encoded(transform: Transform, codec: Codec, tokens: Tensor, wide: bool, order: Tensor | None = None) -> Block:
    """`tokens [rows, kv_heads, T, head_dim]`, or those at `order` int64 `[rows, kv_heads, n]` of them, as a block."""
    count = tokens.shape[2] if order is None else order.shape[2]
    most = at_once(codec, tokens, count)
    if count <= most:
        return _encoded(transform, codec, tokens, wide, order)
    if order is None:
        blocks = [_encoded(transform, codec, part, wide, None) for part in tokens.split(most, 2)]
    else:
        blocks = [_encoded(transform, codec, tokens, wide, part) for part in order.split(most, 2)]
    return {name: torch.cat([block[name] for block in blocks], 2) for name in blocks[0]}


def at_once(codec: Codec, tokens: Tensor, count: int) -> int:
    """How many of `count` tokens are encoded together: all, or a piece, where no more than groups of them share anything."""
    rows, heads, _, channels = tokens.shape
    piece = PIECE.get(type(codec))
    if piece is None or tokens.device.type != "cpu" or (isinstance(codec, UniformQuant) and codec.over_all_tokens):
        return count
    group = codec.token_group()
    return max(group, piece // (rows * heads * channels) // group * group)


def _encoded(transform: Transform, codec: Codec, tokens: Tensor, wide: bool, order: Tensor | None) -> Block:
    if isinstance(codec, UniformQuant) and not isinstance(transform, Basis):
        # Its kernel gathers and transforms while it quantises; tokens are written once, packed.
        return codec.encode(tokens, wide, replace(cast(ChannelMap, transform).before(), order=order))
    return codec.encode(transform.forward(Before(order=order).gathered(tokens)), wide)
