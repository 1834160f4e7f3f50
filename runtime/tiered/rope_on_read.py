"""Keys that are stored before RoPE: unrotated when they are encoded, and to their positions when they are attended."""

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
    """Keys of the tokens of a chunk of each row, `[rows, kv_heads, n, D]`, as they were before RoPE, float32.

    A token's position is its number in its row. A caller whose positions differ from that (position_ids of his own) has keys
    unrotated less or more than RoPE turned them; the way forth is the same, so attention stays right.
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
    """Brings decoded keys of a tile to where RoPE leaves them at their tokens' positions, in one forward."""

    forward: Forward
    rotation: Rotation

    def rotated(self, keys: Tensor, tier: Tier, tile: Tile) -> Tensor:
        """`[rows, kv_heads, tokens, D]`."""
        positions = tier.positions(tile.pages, tile.start, tile.stop)
        if isinstance(positions, slice):
            return Rotation.rotated(
                keys, *cos_sin_between(self.forward, self.rotation, positions.start, positions.stop, keys)
            )
        return Rotation.rotated(keys, *self.rotation.at(positions))

    def across(self, tier: Tier, tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a tile's tokens, tokens last: float32 `[r/2, tokens]`, or where rows or heads differ
        `[rows, kv_heads or 1, r/2, tokens]`."""
        positions = tier.positions(tile.pages, tile.start, tile.stop)
        if isinstance(positions, slice):
            return _between(self.forward, self.rotation.across, positions.start, positions.stop, like)
        cos, sin = self.rotation.at(positions)
        return cos.mT, sin.mT


def tables_between(forward: Forward, rotation: Rotation, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What a kernel puts the cos and sin of the positions [start, stop) together from, as `Rotation.strided` gives it."""
    return _between(forward, rotation.strided, start, stop, like)


def cos_sin_between(forward: Forward, rotation: Rotation, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions [start, stop), float32 `[n, rotated channels / 2]`."""
    return _between(forward, rotation.along, start, stop, like)


def _between(forward: Forward, of: Span, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Worked out by the first layer that asks."""
    key = (of.__name__, start, stop, like.device)
    if key not in forward.readings:
        forward.readings[key] = of(start, stop, like.device)
    found: tuple[Tensor, Tensor] = forward.readings[key]
    return found
