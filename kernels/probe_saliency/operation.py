"""Attention that each token receives from some query rows (probes), by the implementation for the device."""

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
        positions: position of each probe row among the keys, int64 `[n]` on the host, ascending.
        scale, softcap, sliding: softmax scale, soft cap of the logits, and sliding window: a row sees its own token and the
            `sliding` - 1 before it.
        behind: (least, most) distance at which a row is counted for a token before it; None: for all tokens that it sees.
        normalisers: log-sum-exp of each row of `query`, float32 `[rows, heads, n or T]`, if attention has computed it: a kernel
            then needs only one of two passes over the keys.

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
