"""Attention over tokens in sparse coding (CSR), by a Triton kernel if it supports them, else in plain torch."""

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import Attended
from calib.kernels.attend.reference import whole
from calib.kernels.desparsify_attend import reference
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.dispatch import prefers_triton


def supported(query: Tensor, keys: SparsePages | None, values: SparsePages | None) -> bool:
    """Whether the Triton kernel supports these."""
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
    """Attends to a tier's tokens in sparse coding; returns a part of a softmax. Arguments as in `reference.desparsify_attend`.

    mixed / mass is the output, top + log(mass) the log-sum-exp. With `runs` the parts of several runs may be returned unmerged, for
    `attend_exact`.
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
