"""Ways to change a tensor: extreme, constant or singular entries, other shapes and dtypes. All depend on `draw` alone."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e-8, 1e8, 65504.0, -65504.0, 1e12, 1e18, 3e38, -3e38)
NOT_NUMBERS = (float("nan"), float("inf"), float("-inf"))
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def filled(x: Tensor, draw: random.Random) -> Tensor:
    """All entries are one number."""
    return number_like(x, draw).expand(x.shape).clone()


def one_entry(x: Tensor, draw: random.Random) -> Tensor:
    """One entry is replaced."""
    x = x.clone()
    if x.numel():
        x.view(-1)[draw.randrange(x.numel())] = number_like(x, draw)
    return x


def some_entries(x: Tensor, draw: random.Random) -> Tensor:
    """About a tenth of the entries are replaced by one number."""
    chosen = torch.rand(x.shape, generator=torch.Generator().manual_seed(draw.getrandbits(30))) < 0.1
    return torch.where(chosen, number_like(x, draw), x)


def one_row(x: Tensor, draw: random.Random) -> Tensor:
    """All entries at one index of one axis are replaced by one number."""
    x = x.clone()
    if x.numel() and x.dim():
        axis = draw.randrange(x.dim())
        x.select(axis, draw.randrange(x.shape[axis])).copy_(number_like(x, draw))
    return x


def scaled(x: Tensor, draw: random.Random) -> Tensor:
    """Times a power of ten."""
    return (x.double() * draw.choice([1, 1, -1]) * 10.0 ** draw.choice([*range(-38, 39), 0])).to(x.dtype)


def shifted(x: Tensor, draw: random.Random) -> Tensor:
    """Plus a number."""
    return (x.double() + draw.choice(NUMBERS)).to(x.dtype)


def random_values(x: Tensor, draw: random.Random) -> Tensor:
    """All entries are random: Gaussian, times a power of ten."""
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    return (torch.randn(x.shape, generator=generator) * 10.0 ** draw.randint(-6, 6)).to(x.dtype)


def random_bits(x: Tensor, draw: random.Random) -> Tensor:
    """All bits are random; a tensor of bool stays as it is."""
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    raw = torch.randint(0, 256, (x.numel() * x.element_size(),), generator=generator, dtype=torch.uint8)
    return raw.view(x.dtype).view(x.shape) if x.dtype != torch.bool else x


def flipped(x: Tensor, draw: random.Random) -> Tensor:
    """Reversed along an axis, or sorted along it."""
    axis = draw.randrange(max(1, x.dim()))
    return x.flip(axis) if draw.random() < 0.5 and x.dim() else x.sort(dim=axis, stable=True).values


def equal_rows(x: Tensor, draw: random.Random) -> Tensor:
    """All indices of an axis equal the first; a basis becomes singular."""
    axis = draw.randrange(max(1, x.dim()))
    return x.narrow(axis, 0, 1).expand_as(x).clone() if x.dim() and x.numel() else x


def other_shape(x: Tensor, draw: random.Random) -> Tensor:
    """Cut or doubled along an axis, flattened, with another axis, transposed, or a single entry."""
    axis = draw.randrange(max(1, x.dim()))
    how = draw.randrange(6)
    if how == 0 and x.dim():
        return x.narrow(axis, 0, draw.randrange(x.shape[axis] + 1))
    if how == 1 and x.dim():
        return torch.cat([x, x], axis)
    if how == 2:
        return x.flatten()
    if how == 3:
        return x[None]
    return x.reshape(-1)[:1].squeeze() if how == 4 else x.mT if x.dim() > 1 else x[:0]


def other_dtype(x: Tensor, draw: random.Random) -> Tensor:
    """The same numbers in another dtype, rounded as torch does."""
    return x.to(draw.choice(DTYPES))


CHANGES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    change.__name__.replace("_", " "): change
    for change in (
        filled,
        one_entry,
        some_entries,
        one_row,
        scaled,
        shifted,
        random_values,
        random_bits,
        flipped,
        equal_rows,
        other_shape,
        other_dtype,
    )
}


def number_like(x: Tensor, draw: random.Random) -> Tensor:
    """One number in the dtype of `x`; with probability 0.1 NaN or an infinity (0 in a dtype of integers)."""
    value = draw.choice(NOT_NUMBERS) if draw.random() < 0.1 else draw.choice(NUMBERS)
    return torch.tensor(value, dtype=torch.float64).nan_to_num(0 if not x.is_floating_point() else value).to(x.dtype)
