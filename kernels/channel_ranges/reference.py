"""What is measured of a prompt's channels, in plain torch."""

import torch
from torch import Tensor

from calib.kernels.magnitude import largest_magnitude
from calib.kernels.quantise.prologue import Prologue
from calib.kernels.to_half import NARROW, stored


def measured(
    kind: str, tokens: Tensor, dtype: torch.dtype, order: Tensor | None = None, query: Tensor | None = None
) -> list[Tensor]:
    """As `operation.measured`, in tensors of its own."""
    tokens = Prologue(order).gathered(tokens)
    if kind == "range":
        return ranges(tokens, dtype)
    if kind == "balance":
        assert query is not None
        return [balance(tokens, query, dtype)]
    scale = stored(root(largest_magnitude(tokens, 2).float()), dtype == torch.float32)
    return [positive(scale) if kind == "positive root" else scale]


def ranges(tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Centre and half range."""
    low, high = torch.aminmax(tokens, dim=2, keepdim=True)
    # Halved before they meet: values near the end of the range must not overflow.
    upper = high.float() / 2
    half, center = (stored(meet(upper, low, alpha=0.5), dtype == torch.float32) for meet in (torch.sub, torch.add))
    return [center, half.clamp(min=NARROW)]


def balance(tokens: Tensor, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Of keys `tokens` and queries, whose groups are taken together (MiKV, eq. 2)."""
    keys = largest_magnitude(tokens, 2).float()
    by_head = largest_magnitude(query, 2).float()
    queries = by_head.unflatten(1, (tokens.shape[1], -1)).amax(2)
    found = root(queries / keys.clamp_min(torch.finfo(torch.float32).tiny)).half().to(dtype)
    usable = (queries > 0) & (keys > 0) & (found > 0) & found.isfinite()
    return torch.where(usable, found, torch.ones_like(found))


def root(x: Tensor) -> Tensor:
    """Of float32. On a CPU torch's may be a unit beside the nearest float32, as it is for every sixth number with MKL, which shows
    in 16 bits once in 50,000; on a GPU it is the nearest."""
    return x.sqrt()


def positive(scale: Tensor) -> Tensor:
    """`scale [..., D]`, 0 replaced by the least positive one of its D, and by 1 where there is none."""
    least = torch.where(scale > 0, scale, torch.inf).amin(-1, keepdim=True)
    return torch.where(scale > 0, scale, torch.where(least.isinf(), 1, least))
