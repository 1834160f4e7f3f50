"""How much attention each token gets from some query rows, by whichever form of the operation the device runs."""

import torch
from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.probe_saliency import reference
from calib.kernels.upload import upload


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float | None = None,
    sliding: int | None = None,
    behind: tuple[int, int] | None = None,
    normalisers: Tensor | None = None,
) -> Tensor:
    """Column sums of the causal softmax: sum_k A[k, i] over the given rows k and the query heads of a KV head (ZipCache,
    arXiv:2405.14256, eq. 9).

    Args:
        query: `[rows, heads, n, D]`, the probe rows alone, or `[rows, heads, T, D]`, a row for every key.
        keys: `[rows, kv_heads, T, D]`.
        positions: int64 `[n]` on the host, rising: the position of each probe row among the keys.
        scale, softcap, sliding: how products become logits; `sliding` tokens back from the row's own position are seen.
        behind: a row counts for the tokens that it is so many positions behind (least and most); None: for all that it sees.
        normalisers: float32 `[rows, heads, n or T]` like `query`, the logarithm of each row's sum of exponentials, where attention
            has left it: one of two passes over the keys is then enough for a kernel.

    Returns:
        float32 `[rows, kv_heads, T]`.
    """
    if prefers_triton(keys.device):
        from calib.kernels.probe_saliency import triton

        if triton.supports(query, keys, scale):
            return triton.attention_mass(query, keys, positions, scale, softcap, sliding, behind, normalisers)
    if query.shape[2] != len(positions):
        query = query[:, :, upload(positions, torch.int64, query.device)]
    return reference.attention_mass(query, keys, positions, scale, softcap, sliding, behind)
