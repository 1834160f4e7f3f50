"""Encodes tokens: first a transform, then a codec."""

from dataclasses import replace

import torch
from torch import Tensor

from calib.kernels.quantise.prologue import Prologue
from calib.runtime.paging.field import Block
from calib.runtime.stages.contract import Codec, Transform


def encoded(
    transform: Transform, codec: Codec, tokens: Tensor, fp32_params: bool, order: Tensor | None = None
) -> Block:
    """Encodes `tokens [rows, kv_heads, T, head_dim]`, or only those at `order` int64 `[rows, kv_heads, n]`; returns the block."""
    count = tokens.shape[2] if order is None else order.shape[2]
    most = at_once(codec, tokens, count)
    if count <= most:
        return _encoded(transform, codec, tokens, fp32_params, order)
    if order is None:
        blocks = [_encoded(transform, codec, part, fp32_params, None) for part in tokens.split(most, 2)]
    else:
        blocks = [_encoded(transform, codec, tokens, fp32_params, part) for part in order.split(most, 2)]
    return {name: torch.cat([block[name] for block in blocks], 2) for name in blocks[0]}


def at_once(codec: Codec, tokens: Tensor, count: int) -> int:
    """How many of `count` tokens are encoded in one call: all; on a CPU a piece (`Codec.piece`), in whole groups, if no parameter
    is shared by more than a group."""
    rows, heads, _, channels = tokens.shape
    piece = codec.piece
    if piece is None or tokens.device.type != "cpu" or codec.over_all_tokens:
        return count
    group = codec.token_group()
    return max(group, piece // (rows * heads * channels) // group * group)


def encodes_as_they_lie(transform: Transform, codec: Codec, tokens: Tensor) -> bool:
    """Whether `tokens [rows, kv_heads, any, head_dim]` are read by a kernel that writes nothing but their block, so that encoding
    any number of them takes no memory besides the block."""
    return codec.fuses_transform and transform.prologue() is not None and codec.encodes_as_they_lie(tokens)


def _encoded(transform: Transform, codec: Codec, tokens: Tensor, fp32_params: bool, order: Tensor | None) -> Block:
    if codec.fuses_transform and (prologue := transform.prologue()) is not None:
        # The codec's kernel gathers and transforms while it quantises; only packed tokens are written.
        return codec.encode(tokens, fp32_params, replace(prologue, order=order))  # type: ignore[call-arg]
    tokens = Prologue(order=order).gathered(tokens)
    projection = transform.projection()
    block = None if projection is None else codec.encode_projected(tokens, projection)
    return codec.encode(transform.forward(tokens), fp32_params) if block is None else block
