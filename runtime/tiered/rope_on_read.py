"""RoPE of keys that are stored before RoPE: removed when they are encoded, applied again when they are attended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from calib.kernels.unrotate.operation import unrotated as before_rope
from calib.runtime.attend.read_plan import Tile
from calib.runtime.paging.forward import Forward
from calib.runtime.rotation import Rotation
from calib.runtime.tiered.tier import Tier

Span: TypeAlias = Callable[[int, int, torch.device], tuple[Tensor, Tensor]]


def unrotated(forward: Forward, rotation: Rotation, keys: Tensor, chunks: list[range]) -> Tensor:
    """Keys of a chunk of each row, `[rows, kv_heads, n, D]`, with RoPE removed, float32.

    A token's position is its index in its row. If a caller passes other position_ids, another rotation is removed than the
    model applied; the same rotation is applied again on reading, so attention stays correct.
    """
    key = ("chunks", *((chunk.start, chunk.stop) for chunk in chunks), keys.device)
    if key not in forward.readings:
        each = {chunk: cos_sin_between(forward, rotation, chunk.start, chunk.stop, keys) for chunk in chunks}
        pairs = [each[chunk] for chunk in chunks]
        forward.readings[key] = pairs[0] if len(each) == 1 else tuple(map(torch.stack, zip(*pairs, strict=True)))
    cos, sin = forward.readings[key]
    return before_rope(keys, cos, sin)


@dataclass(frozen=True)
class RopeOnRead:
    """Rotates the decoded keys of tiles to their tokens' positions, in one forward."""

    forward: Forward
    rotation: Rotation

    def rotated(self, keys: Tensor, tier: Tier, tile: Tile) -> Tensor:
        """The keys of a tile, `[rows, kv_heads, tokens, D]`, rotated to their positions."""
        positions = tier.positions(tile.pages, tile.start, tile.stop)
        if isinstance(positions, slice):
            return Rotation.rotated(
                keys, *cos_sin_between(self.forward, self.rotation, positions.start, positions.stop, keys)
            )
        return Rotation.rotated(keys, *self.rotation.at(positions))

    def across(self, tier: Tier, tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a tile's positions, with tokens last: float32 `[r/2, tokens]`, or where rows or heads differ
        `[rows, kv_heads or 1, r/2, tokens]`."""
        positions = tier.positions(tile.pages, tile.start, tile.stop)
        if isinstance(positions, slice):
            return _between(self.forward, self.rotation.across, positions.start, positions.stop, like)
        cos, sin = self.rotation.at(positions)
        return cos.mT, sin.mT


def tables_between(forward: Forward, rotation: Rotation, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tables from which a kernel combines cos and sin of the positions [start, stop), as `Rotation.strided` returns them."""
    return _between(forward, rotation.strided, start, stop, like)


def cos_sin_between(forward: Forward, rotation: Rotation, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions [start, stop), float32 `[n, rotated channels / 2]`."""
    return _between(forward, rotation.along, start, stop, like)


def _between(forward: Forward, of: Span, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors of `of` for [start, stop); computed by the first layer that asks."""
    key = (of.__name__, start, stop, like.device)
    if key not in forward.readings:
        forward.readings[key] = of(start, stop, like.device)
    found: tuple[Tensor, Tensor] = forward.readings[key]
    return found
