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

PIECE = 2**19  # values


def encoded(transform: Transform, codec: Codec, tokens: Tensor, wide: bool, order: Tensor | None = None) -> Block:
    """`tokens [rows, kv_heads, T, head_dim]`, or those at `order` int64 `[rows, kv_heads, n]` of them, as a block.

    A uniform codec's kernel gathers and transforms while it quantises; tokens are written once, packed.
    """
    if isinstance(codec, UniformQuant) and not isinstance(transform, Basis):
        return codec.encode(tokens, wide, replace(cast(ChannelMap, transform).before(), order=order))
    tokens = Before(order=order).gathered(tokens)
    if isinstance(codec, MixedQuant):
        blocks = [codec.encode(transform.forward(piece)) for piece in tokens.split(_piece(tokens), 2)]
        return {name: torch.cat([block[name] for block in blocks], 2) for name in blocks[0]}
    return codec.encode(transform.forward(tokens), wide)


def _piece(tokens: Tensor) -> int:
    """Tokens at once of those that are encoded one by one: on a CPU as many as its own cache holds on their way."""
    rows, heads, count, channels = tokens.shape
    return max(1, PIECE // (rows * heads * channels)) if tokens.device.type == "cpu" else max(1, count)
