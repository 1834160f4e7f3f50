"""Decode step of a budget of heavy hitters (H2O), by the implementation for the device."""

from collections.abc import Sequence

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.heavy_hitters import reference
from calib.kernels.heavy_hitters.reference import BudgetSlots, MassRule, NewToken, lightest

__all__ = ["BudgetSlots", "MassRule", "NewToken", "enter_ring", "lightest"]


def enter_ring(
    rule: MassRule | None, mass: Tensor, shown: Tensor, fresh: Tensor, slots: BudgetSlots, tokens: Sequence[NewToken]
) -> list[Tensor]:
    """Stores each row's new token in its ring of recent tokens, and lets the token that was in that slot compete with the heavy
    hitters (H2O, arXiv:2306.14048, section 4.2).

    It replaces the heavy token with the lowest score (of equal ones the newest) if its own score is higher; else it is removed.

    Args:
        rule: how scores follow from attention; None: no scores; the token that leaves the ring goes to the free slot.
        mass: accumulated attention, float32 `[rows, numbers x kv_heads, slots]`, updated; numbers is 1, or 2 with `rule.mean`: then
            the number of query rows that have seen each token follows.
        shown: attention of this step to the first n slots, `[rows, numbers x kv_heads, n]`.
        fresh: the same numbers of the new token, `[rows, numbers x kv_heads, 1]`.
        slots: the slots that are involved.
        tokens: fields of the pages, updated, and of the new tokens.

    Returns:
        For each field the former contents of the slot that was overwritten, `[rows, kv_heads, 1, W]`: the removed token in rows
        that compete.
    """
    if prefers_triton(mass.device):
        from calib.kernels.heavy_hitters import triton

        if triton.supports(mass, slots, tokens):
            return triton.enter_ring(rule, mass, shown, fresh, slots, tokens)
    return reference.enter_ring(rule, mass, shown, fresh, slots, tokens)
