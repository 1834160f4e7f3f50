"""Attention that each token receives from some query rows (probes), without forming the attention matrix (ZipCache, eq. 9).

Rows are processed in tiles, whose logits with all keys are in memory at once, so that the extra memory is O(T). A row at position p
sees the keys 0 ... p. Rows must be in ascending order of position, because a tile reads no key behind its last row.
"""

import torch
from torch import Tensor

# Logits in memory at once: few enough that a tile stays in the processor's cache while it is read several times.
TILE_ELEMENTS = 2**20


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None = None,
    sliding: int | None = None,
    behind: tuple[int, int] | None = None,
) -> Tensor:
    """Column sums of the causal softmax: sum_k A[k, i] over the given rows k and the query heads of a KV head.

    Args:
        query: `[rows, heads, n, D]`, the probe rows alone.
        keys: `[rows, kv_heads, T, D]`.
        positions: position of each probe row among the keys, int64 `[n]` on the host, ascending.
        scale, softcap, sliding: softmax scale, soft cap of the logits, and sliding window: a row sees its own token and the
            `sliding` - 1 before it.
        behind: (least, most) distance at which a row is counted for a token before it; None: for all tokens that it sees.

    Returns:
        float32 `[rows, kv_heads, T]`.
    """
    (rows, kv_heads, total, _), group = keys.shape, query.shape[1] // keys.shape[1]
    mass = torch.zeros(rows, kv_heads, total, dtype=torch.float32, device=keys.device)
    transposed = keys.float().mT
    columns = torch.arange(total, device=keys.device)
    step = max(1, TILE_ELEMENTS // (rows * kv_heads * group * max(total, 1)))
    for at in range(0, query.shape[2], step):
        own = positions[at : at + step]
        stop = int(own[-1]) + 1
        tile = (query[:, :, at : at + step].float() * scale).unflatten(1, (kv_heads, group)).flatten(2, 3)
        logits = tile @ transposed[..., :stop]
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        own = own.to(keys.device)[:, None]
        hidden = columns[:stop] > own
        if sliding is not None:
            hidden |= columns[:stop] <= own - sliding
        logits.unflatten(2, (group, -1)).masked_fill_(hidden, -torch.inf)
        probabilities = logits.softmax(-1)
        if behind is not None:
            apart = own - columns[:stop]
            counted = (apart >= behind[0]) & (apart <= behind[1])
            probabilities.unflatten(2, (group, -1)).mul_(counted)
        mass[..., :stop] += probabilities.sum(-2)
    return mass
