"""Rotations for the method `oscar`: coordinates in which errors count the same for attention (OSCAR, arXiv:2605.17757).

Tensors: `keys.rotation`, `values.rotation`, float32 `[layers, kv_heads, head_dim, head_dim]`. For each layer and KV head:

    C_K = E[q q^T]                  of its query heads after RoPE: ||Q K^T - Q K^^T||^2 = tr((K - K^) C_K (K - K^)^T)
    C_S = V^T S^T S V = E[o o^T]    o = S V, the attention outputs of its query heads, S their attention probabilities
    C   = U diag(l) U^T             l_1 >= l_2 >= ...
    R   = U H P                     H the normalised Hadamard matrix, P the permutation that reverses the bits of a column's number

A key or value x becomes y = R^T x. The tensor holds R^T, so its rows are coordinates. In the coordinates of U H every entry on the
diagonal of C is tr(C) / D, D = head_dim. If D is no power of two, which the paper leaves open, H and P act on equal blocks whose
size is the largest power of two that divides D.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.attention import exact_attention
from calib.runtime.logits import Logits
from calib.runtime.stages.hadamard import hadamard
from calib.statistics.contract import Statistic, tokens_of
from calib.statistics.residual_basis import leading


class AttentionRotations(Statistic):
    """For every layer and KV head, sums of q q^T and o o^T over all tokens and the group's query heads.

    Both sums are float64 `[layers, kv_heads, head_dim, head_dim]`: 134 MB each for Llama 2 7B (32 layers, 32 KV heads of 128
    channels).
    """

    reductions = {"queries": "sum", "outputs": "sum"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.group = shape.heads // shape.kv_heads
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
        for name in self.reductions:
            self.register_buffer(name, torch.zeros(sizes, dtype=torch.float64))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's queries, and its attention outputs, which are recomputed in float32."""
        exact = (part.float() for part in (sample.queries, sample.keys, sample.values))
        mask = None if bool(sample.mask.all()) else sample.mask
        outputs = exact_attention(*exact, mask, Logits(sample.scaling, sample.softcap, sample.window))
        for total, x in ((self.queries, sample.queries), (self.outputs, outputs)):
            rows = tokens_of(x, sample.mask).double().unflatten(0, (-1, self.group)).flatten(1, 2)
            total[sample.layer] += (rows.mT @ rows).to(total.device)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the rotations; layers without samples have those of C = identity."""
        return {"keys.rotation": rotation(self.queries.cpu()), "values.rotation": rotation(self.outputs.cpu())}


def rotation(covariance: Tensor) -> Tensor:
    """Returns (U H P)^T of the second moment `covariance [..., D, D]` float64 (its scale does not matter).

    The result is float32 `[..., D, D]` with orthonormal rows.
    """
    channels = covariance.shape[-1]
    mixed = hadamard(channels).mT @ leading(covariance, channels).double()
    return mixed[..., bit_reversal(channels), :].float()


def bit_reversal(size: int) -> Tensor:
    """Returns the order P of columns, int64 `[size]`: bit reversal within blocks of the largest power of two that divides
    `size`."""
    block = size & -size
    order = torch.zeros(1, dtype=torch.int64)
    while len(order) < block:
        order = torch.cat([2 * order, 2 * order + 1])
    return (torch.arange(0, size, block)[:, None] + order).flatten()
