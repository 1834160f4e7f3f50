"""Keys that are stored before RoPE: turned back when they are encoded, and to their places when they are attended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from calib.runtime.rotation import Rotation
from calib.runtime.rows import Forward
from calib.runtime.tiered.reading import Tile
from calib.runtime.tiered.tier import Tier

Span: TypeAlias = Callable[[int, int, torch.device], tuple[Tensor, Tensor]]


def turned_back(forward: Forward, rotation: Rotation, keys: Tensor, chunk: range) -> Tensor:
    """Keys of the tokens of a `chunk`, `[rows, kv_heads, n, D]`, as they were before RoPE, float32.

    A token's place is its number in its row. A caller whose positions differ from that (position_ids of his own) has keys
    turned back less or more than RoPE turned them; the way forth is the same, so attention stays right.
    """
    cos, sin = turns_between(forward, rotation, chunk.start, chunk.stop, keys)
    return Rotation.turned(keys.float(), cos, -sin)


@dataclass(frozen=True)
class ToPlaces:
    """Brings decoded keys of a tile to where RoPE leaves them at their tokens' places, in one forward."""

    forward: Forward
    rotation: Rotation

    def turned(self, keys: Tensor, tier: Tier, tile: Tile) -> Tensor:
        """`[rows, kv_heads, tokens, D]`."""
        places = tier.places(*tile[:3])
        if isinstance(places, slice):
            return Rotation.turned(keys, *turns_between(self.forward, self.rotation, places.start, places.stop, keys))
        return Rotation.turned(keys, *self.rotation.at(places))

    def turned_across(self, keys: Tensor, tier: Tier, tile: Tile) -> Tensor:
        """`[rows, kv_heads, D, tokens]`, in place."""
        places = tier.places(*tile[:3])
        if isinstance(places, slice):
            turns = _between(self.forward, self.rotation.across, places.start, places.stop, keys)
            return Rotation.turned_across(keys, *turns)
        cos, sin = self.rotation.at(places)
        return Rotation.turned_across(keys, cos.mT, sin.mT)


def tables_between(forward: Forward, rotation: Rotation, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What a kernel puts the turns of the places [start, stop) together from, as `Rotation.strided` gives it."""
    return _between(forward, rotation.strided, start, stop, like)


def turns_between(forward: Forward, rotation: Rotation, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the places [start, stop), float32 `[n, rotated channels / 2]`."""
    return _between(forward, rotation.along, start, stop, like)


def _between(forward: Forward, of: Span, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Worked out by the first layer that asks."""
    key = (of.__name__, start, stop, like.device)
    if key not in forward.readings:
        forward.readings[key] = of(start, stop, like.device)
    found: tuple[Tensor, Tensor] = forward.readings[key]
    return found
