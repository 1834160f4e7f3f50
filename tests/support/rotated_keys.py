"""Pages of codes of key components before RoPE, the decoded keys in float64, and their rotation to positions."""

import torch
from mixed_words import Words
from paged_attention import Pages

from calib.kernels.attend.operation import RopeTables
from calib.runtime.rotation import Rotation

HEADS = 3


def keys_of(own: Words, channels: int, seed: int) -> tuple[Pages, RopeTables]:
    """Random pages of codes with their decoded keys before RoPE in float64, and `RopeTables` whose two tables are still empty."""
    draw = torch.Generator().manual_seed(seed)
    levels, (pages, codes) = own.levels(), own.drawn(3, draw)
    axes = torch.randn(HEADS, len(levels), channels, generator=draw) / levels[:, None] * own.own().mT
    size = 2.0 ** torch.randint(-3, 3, (HEADS, 1, 1), generator=draw)
    mean, axes = torch.randn(HEADS, 1, channels, generator=draw), (axes / size).half()
    tokens = mean.double() + size.double() * ((codes - (levels - 1) / 2).double() @ axes.double())
    return Pages(own.stream(pages), tokens), RopeTables(axes, size, mean, *torch.empty(2, 0))


def tables(rotation: Rotation, first: int, count: int) -> dict[str, torch.Tensor]:
    """The coarse and fine RoPE tables for `count` positions from `first` on."""
    coarse, fine = rotation.strided(first, first + count, torch.device("cpu"))
    return {"coarse": coarse, "fine": fine}


def make_rope_tables(rotation: Rotation, positions: torch.Tensor):
    """Return a function that rotates keys `[rows, kv_heads, slots, D]` to `positions`, which broadcast, in float64."""

    def rotated(keys: torch.Tensor) -> torch.Tensor:
        angles = positions.double()[..., None] * rotation.frequencies
        return Rotation.rotated(keys, angles.cos(), angles.sin())

    return rotated
