"""Random keys and values that resemble a model's, and changes of them so that float32 and float64 find the same outliers."""

from collections.abc import Iterable

import numpy as np
import torch
from gear.layer import GearLayer
from gear.oracle import Spec, per_side, rows


def real_like(shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """Float32 `[kv_heads, T, D]`: a part of rank 3 in which neighbouring tokens are similar, noise, and a few large channels and
    tokens.

    Trained keys are similar after RoPE (KIVI, figure 2): a head has a few channels ten times as large as the others.
    """
    heads, tokens, channels = shape
    draw = np.random.default_rng(seed)
    slow = np.cumsum(draw.standard_normal((heads, tokens, 3)), 1) / np.sqrt(tokens)
    x = 3 * slow @ draw.standard_normal((heads, 3, channels)) + draw.standard_normal(shape)
    for head in x:
        large = draw.choice(channels, max(1, channels // 16), replace=False)
        head[:, large] = head[:, large] * 2 + 10 * draw.choice([-1, 1], len(large))
        head[draw.choice(tokens, max(1, tokens // 50), replace=False)] *= 4
    return x.astype(np.float32)


def spans(sizes: Iterable[int], spec: Spec) -> list[tuple[int, int]]:
    """(first, last + 1) token of the segments of a row whose forwards have these sizes."""
    sizes = list(filter(None, sizes))
    row, found = GearLayer(spec), []
    row.prompt = sizes[0]
    while row.encoded + row.size() <= sum(sizes):
        found.append((row.encoded, row.encoded + row.size()))
        row.encoded = found[-1][1]
    return found


def untie(part: torch.Tensor, spec: Spec, stream: str) -> None:
    """Change `part` so that in no row of outliers an entry equals an outlier that is taken, because either could be taken.

    `part [kv_heads, T, D]` is a segment. Such ties are frequent with 16 bits and long rows. An entry that equals the last outlier
    taken is moved to the next number towards the middle. A row whose entries are all equal stays as it is.
    """
    spec = spec.of_stream(stream)
    positions = torch.from_numpy(rows(tuple(part.shape), spec, stream))
    count = per_side(spec, positions.shape[1])
    if not count or 2 * count == positions.shape[1]:
        return
    flat = part.flatten().clone()
    entries = flat[positions]  # no two rows share an entry
    for sign in (1, -1):
        order = (sign * entries.float()).argsort(descending=True, stable=True)
        border = entries.gather(1, order[:, count - 1 : count])
        same = (entries == border).scatter_(1, order[:, :count], False)
        uneven = same.sum(1, keepdim=True) < positions.shape[1] - count
        inwards = torch.nextafter(border, border - sign * border.abs() - sign)
        entries = torch.where(same & uneven, inwards, entries)
    flat[positions] = entries
    part.copy_(flat.reshape(part.shape))
