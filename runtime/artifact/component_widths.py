"""A budget of bits for components that may have any widths: reverse water-filling over a whole model, component by component.

For stored chunks whose heads have one basis (`runtime/storage/joint_layer.py`). At a price of a bit (the Lagrange multiplier) every
component takes the width with the least error plus cost, but none more than a component that varies more; the least price that the
budget allows is used. A layer's keys and values of a token have a size of four bits each, and take whole words of 16 bits together.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from calib.kernels.attend.operation import SIZE_BITS
from calib.kernels.pack.reference import WORD_BITS
from calib.runtime.artifact.component_bits import MOST_BITS, ROLES, Allocation, Words
from calib.runtime.messages.printable import printable

HALVINGS = 60  # bisections of the range of prices, in logarithms: down to the resolution of float64


def widths_at(errors: Mapping[str, Tensor], bits: float) -> Allocation:
    """Returns the allocation with the least error at `bits` per value, or a little fewer.

    Args:
        errors: for "keys" and "values", float `[layers, 1, W, 9]` at 0 ... 8 bits, the component that varies most first.
        bits: bits per value, sizes included.

    Returns:
        For each stream a single `Words` whose fields are the components with bits, at least one.

    Raises ValueError for a budget that cannot be met.
    """
    both = torch.stack([errors[role][:, 0].double() for role in ROLES])  # [2, layers, W, 9]
    values = both[..., 0].numel()
    least = WORD_BITS * both.shape[1] * -(-2 * (1 + SIZE_BITS) // WORD_BITS) / values
    if type(bits) not in (float, int) or not least <= bits <= MOST_BITS:
        raise ValueError(f"bits must be a number from {least:.3g} to {MOST_BITS}, got {printable(bits)}; 2 is usual")
    top = float(both.amax()) + torch.finfo(torch.float64).tiny
    low, high = top * 1e-30, top
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _bits(_widths(both, middle)) > bits * values else (low, middle)
    found = _widths(both, high)
    streams = {
        role: tuple(Words(tuple(int(width) for width in own if width), (1,)) for own in part.tolist())
        for role, part in zip(ROLES, found, strict=True)
    }
    of_keys, of_values = both.gather(-1, found[..., None]).sum((2, 3)).tolist()
    return Allocation(streams, _bits(found) / values, {"keys": tuple(of_keys), "values": tuple(of_values)})


def _widths(errors: Tensor, price: float) -> Tensor:
    """The width of each component at a price of a bit: int64 `[2, layers, W]`."""
    costs = errors + price * torch.arange(MOST_BITS + 1, dtype=errors.dtype)
    found = costs.argmin(-1).cummin(-1).values
    found[..., 0].clamp_(min=1)
    return found


def _bits(widths: Tensor) -> int:
    """Bits of a token, sizes included, in whole words for each layer."""
    return int((-(-(widths.sum((0, 2)) + 2 * SIZE_BITS) // WORD_BITS)).sum()) * WORD_BITS
