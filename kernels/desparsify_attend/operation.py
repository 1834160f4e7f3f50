"""Attention over sparse tokens, by the kernel where it serves."""

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import Attended
from calib.kernels.attend.reference import whole
from calib.kernels.desparsify_attend import reference
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.dispatch import prefers_triton


def supported(query: Tensor, keys: SparsePages | None, values: SparsePages | None) -> bool:
    """Whether the kernel takes these."""
    if keys is None or values is None or not prefers_triton(query.device):
        return False
    from calib.kernels.desparsify_attend import triton

    return triton.supports(query, keys, values)


@torch.no_grad()
def desparsify_attend(
    query: Tensor,
    keys: SparsePages,
    values: SparsePages,
    table: Tensor,
    used: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    back: Tensor | None = None,
    runs: bool = False,
) -> Attended:
    """`query [rows, kv_heads, R, D]` over a tier's pairs. With `runs` the parts of several runs may wait for `attend_exact`.

    mixed / mass is the output, top + log(mass) the log-sum-exp. Arguments are those of the reference, which explains them.
    """
    arguments = (query, keys, values, table, used, cos_sin, positions, softcap, back)
    if not supported(query, keys, values):
        top, mass, mixed = reference.desparsify_attend(*arguments)
        return Attended(top[..., None], mass[..., None], mixed, None)
    from calib.kernels.desparsify_attend import triton

    with torch.cuda.device_of(query):
        top, mass, mixed = triton.desparsify_attend(*arguments)
    if top.shape[2] == 1:
        return Attended(top[:, :, 0, :, None], mass[:, :, 0, :, None], mixed[:, :, 0], None)
    found = Attended(top[..., None], mass[..., None], mixed, None)
    return found if runs else whole(found)
