"""Attention over packed tokens in plain torch: products with the codes first, scales and zero points afterwards.

Nothing here decodes a cache: a tile's codes become float32 integers, the query (for keys) or the weights (for values)
carries the scales, and tiles meet in one running softmax. Shapes: any leading dimensions, then `[kv_heads, rows, ...]`,
where `rows` are the query rows of a KV head (group x new tokens) and `tokens` the tokens of the tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.pack.reference import unpack


def uniform_scores(query: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """q.x^ without x^: `query [..., rows, D]` float32, `words [..., T, W]`, parameters `[..., T/g_t, D/g_c]`.

    Returns `[..., rows, T]` float32. With x^ = c s + z: parameters per channel fold into the query of their token
    group, parameters per token multiply the partial products of their channel group.
    """
    channels, tokens = query.shape[-1], words.shape[-2]
    codes = unpack(words, bits, channels, torch.float32)
    scale, zero = scale.float(), zero.float()
    blocks, columns = scale.shape[-2:]
    if columns == channels:  # g_c = 1
        folded = query[..., None, :, :] * scale[..., :, None, :]  # [..., blocks, rows, D]
        products = folded @ codes.unflatten(-2, (blocks, tokens // blocks)).mT  # [..., blocks, rows, g_t]
        offset = (query @ zero.mT).mT[..., None]  # [..., blocks, rows, 1]
        return (products + offset).movedim(-3, -2).flatten(-2)
    parts = query.unflatten(-1, (columns, channels // columns)).movedim(-2, -3)  # [..., columns, rows, g_c]
    products = parts @ codes.unflatten(-1, (columns, channels // columns)).movedim(-2, -3).mT
    per_token = tokens // blocks
    scale, zero = scale.repeat_interleave(per_token, -2), zero.repeat_interleave(per_token, -2)
    return (products * scale.mT[..., None, :]).sum(-3) + parts.sum(-1).mT @ zero.mT


def uniform_mix(weights: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bits: int, channels: int) -> Tensor:
    """sum_t p_t x^_t without x^: `weights [..., rows, T]` float32 -> `[..., rows, D]` float32; the rest as above."""
    tokens = words.shape[-2]
    codes = unpack(words, bits, channels, torch.float32)
    scale, zero = scale.float(), zero.float()
    blocks, columns = scale.shape[-2:]
    if columns == channels:  # g_c = 1
        parts = weights.unflatten(-1, (blocks, tokens // blocks)).movedim(-2, -3)  # [..., blocks, rows, g_t]
        products = parts @ codes.unflatten(-2, (blocks, tokens // blocks))  # [..., blocks, rows, D]
        return (products * scale[..., :, None, :]).sum(-3) + parts.sum(-1).mT @ zero
    per_token = tokens // blocks
    scale, zero = scale.repeat_interleave(per_token, -2), zero.repeat_interleave(per_token, -2)
    folded = weights[..., None, :, :] * scale.mT[..., None, :]  # [..., columns, rows, T]
    products = folded @ codes.unflatten(-1, (columns, channels // columns)).movedim(-2, -3)
    return (products + (weights @ zero).mT[..., None]).movedim(-3, -2).flatten(-2)


@dataclass
class RunningSoftmax:
    """Softmax attention accumulated tile by tile; the merge of all tiers and the exact window.

    `top` and `mass` are `[..., rows, 1]`, `mixed` `[..., rows, D]`, float32: mixed / mass is the output so far and
    top + log(mass) the log-sum-exp.
    """

    top: Tensor
    mass: Tensor
    mixed: Tensor

    @classmethod
    def empty(cls, query: Tensor, channels: int) -> "RunningSoftmax":
        """Nothing attended yet, for `query [..., rows, D]`."""
        shape = (*query.shape[:-1], 1)
        top = torch.full(shape, -torch.inf, dtype=torch.float32, device=query.device)
        return cls(top, torch.zeros_like(top), top.new_zeros(*shape[:-1], channels))

    def weights(self, scores: Tensor) -> Tensor:
        """Takes a tile's `scores [..., rows, T]` (masked ones -inf), rescales what is there, returns the tile's weights."""
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        # A row that has met nothing but masked tokens keeps top = -inf; its weights must be 0, not NaN.
        finite = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        weights = torch.exp(scores - finite)
        keep = torch.exp(self.top - finite)
        self.top = top
        self.mass = self.mass * keep + weights.sum(-1, keepdim=True)
        self.mixed = self.mixed * keep
        return weights

    def add(self, mixed: Tensor) -> None:
        """Adds the tile's weighted values `[..., rows, D]`."""
        self.mixed = self.mixed + mixed

    def output(self) -> Tensor:
        """Attention output `[..., rows, D]`; 0 for a row that met no token at all (padding)."""
        return self.mixed / self.mass.clamp_min(torch.finfo(torch.float32).tiny)
