"""Per-channel statistics of a prompt in plain torch."""

import torch
from torch import Tensor

from calib.kernels.magnitude import largest_magnitude
from calib.kernels.quantise.prologue import Prologue
from calib.kernels.to_half import NARROW, stored


def measured(
    kind: str, tokens: Tensor, dtype: torch.dtype, order: Tensor | None = None, query: Tensor | None = None
) -> list[Tensor]:
    """As `operation.measured`, in new tensors."""
    tokens = Prologue(order).gathered(tokens)
    if kind == "range":
        return ranges(tokens, dtype)
    if kind == "balance":
        assert query is not None
        return [balance(tokens, query, dtype)]
    scale = stored(root(largest_magnitude(tokens, 2).float()), dtype == torch.float32)
    return [positive(scale) if kind == "positive root" else scale]


def ranges(tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Centre and half range of each channel."""
    low, high = torch.aminmax(tokens, dim=2, keepdim=True)
    # Halved before they are added or subtracted, so that values near the end of the range do not overflow.
    upper = high.float() / 2
    half, center = (stored(meet(upper, low, alpha=0.5), dtype == torch.float32) for meet in (torch.sub, torch.add))
    return [center, half.clamp(min=NARROW)]


def balance(tokens: Tensor, query: Tensor, dtype: torch.dtype) -> Tensor:
    """sqrt(max |q| / max |k|) of each channel, over the query heads of a KV head (MiKV, eq. 2); 1 where it is not usable."""
    keys = largest_magnitude(tokens, 2).float()
    by_head = largest_magnitude(query, 2).float()
    queries = by_head.unflatten(1, (tokens.shape[1], -1)).amax(2)
    found = root(queries / keys.clamp_min(torch.finfo(torch.float32).tiny)).half().to(dtype)
    usable = (queries > 0) & (keys > 0) & (found > 0) & found.isfinite()
    return torch.where(usable, found, torch.ones_like(found))


def root(x: Tensor) -> Tensor:
    """Square root in float32. On a CPU torch's result may be 1 ulp from the nearest float32, with MKL for every sixth number, which
    changes the float16 result once in 50,000; on a GPU it is correctly rounded."""
    return x.sqrt()


def positive(scale: Tensor) -> Tensor:
    """`scale [..., D]` with each 0 replaced by the smallest positive of the D numbers, or by 1 if there is none."""
    least = torch.where(scale > 0, scale, torch.inf).amin(-1, keepdim=True)
    return torch.where(scale > 0, scale, torch.where(least.isinf(), 1, least))
