"""Random inputs with the difficulties of real ones: outlier channels in keys and values, attention on few tokens."""

import torch
from torch import Tensor

OUTLIER_CHANNELS, OUTLIER_SCALE = 4, 8.0
SPREAD = 3.0  # standard deviation of the logits: a few tokens have most of a row's attention


def tokens(
    rows: int, kv_heads: int, count: int, head_dim: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns keys or values `[rows, kv_heads, count, head_dim]`: normal; some channels of a head are 8 times as wide, shifted."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, kv_heads, count, head_dim, generator=draw, device=device, dtype=dtype)
    wide = torch.rand(kv_heads, head_dim, generator=draw, device=device).argsort(-1) < min(
        OUTLIER_CHANNELS, head_dim // 8
    )
    scale = torch.where(wide, OUTLIER_SCALE, 1.0).to(dtype)[:, None]
    return x.add_((scale - 1) / 2).mul_(scale)


def queries(keys: Tensor, heads: int, count: int, seed: int) -> Tensor:
    """Returns queries `[rows, heads, count, head_dim]` whose scaled logits against `keys` have standard deviation `SPREAD`."""
    rows, kv_heads, held, head_dim = keys.shape
    draw = torch.Generator(keys.device).manual_seed(seed)
    query = torch.randn(rows, heads, count, head_dim, generator=draw, device=keys.device, dtype=keys.dtype)
    sample = keys[:, :, :: max(1, held // 256)].float()
    deviation = sample.std(2, keepdim=True).repeat_interleave(heads // kv_heads, 1)
    length = deviation.square().sum(-1, keepdim=True).sqrt()
    return query.mul_(SPREAD * head_dim**0.5 / length)


def vectors(count: int, width: int, seed: int, device: torch.device) -> Tensor:
    """Returns float32 `[count, width]`, sparse sums of shared directions with noise and three wider channels, for dictionaries."""
    draw = torch.Generator(device).manual_seed(seed)
    shared = torch.randn(64, width, generator=torch.Generator(device).manual_seed(0), device=device)
    weights = torch.randn(count, 64, generator=draw, device=device).relu()
    x = weights @ shared / 8 + 0.3 * torch.randn(count, width, generator=draw, device=device)
    x[:, :3] *= 6
    return x
