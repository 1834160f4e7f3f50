"""A budget of bits for components that may have any widths: reverse water-filling over a whole model, component by component.

Of stored chunks whose heads have one basis (`runtime/storage/joint_layer.py`). At a price of a bit every component takes the width
that is worth most, none more than one that varies more; the least price that the budget allows is taken. A token's keys and values
of a layer have a size of four bits each, and lie in whole words of 16 bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from calib.kernels.attend.operation import SIZE_BITS
from calib.kernels.pack.reference import WORD_BITS
from calib.runtime.artifact.component_bits import MOST_BITS, ROLES, Allocation, Words
from calib.runtime.messages.printable import printable

HALVINGS = 60  # of the range of prices, by logarithm: below a unit of float64


def widths_at(errors: Mapping[str, Tensor], bits: float) -> Allocation:
    """The least error at so many bits per value, or a little fewer.

    Args:
        errors: of "keys" and "values", float `[layers, 1, W, 9]` at 0 ... 8 bits, components from the one that varies most.
        bits: per value, sizes included.

    Returns:
        One word a stream whose fields are the components with bits, at least one.

    Raises ValueError for a budget out of reach.
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
    """int64 `[2, layers, W]`."""
    costs = errors + price * torch.arange(MOST_BITS + 1, dtype=errors.dtype)
    found = costs.argmin(-1).cummin(-1).values
    found[..., 0].clamp_(min=1)
    return found


def _bits(widths: Tensor) -> int:
    """Of a token, in whole words a layer."""
    return int((-(-(widths.sum((0, 2)) + 2 * SIZE_BITS) // WORD_BITS)).sum()) * WORD_BITS
