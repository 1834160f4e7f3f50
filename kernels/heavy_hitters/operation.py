"""A decode step of a budget of important tokens, by whichever form of the operation the device runs."""

from collections.abc import Sequence

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.heavy_hitters import reference
from calib.kernels.heavy_hitters.reference import BudgetSlots, MassRule, NewToken, lightest

__all__ = ["BudgetSlots", "MassRule", "NewToken", "enter_ring", "lightest"]


def enter_ring(
    rule: MassRule | None, mass: Tensor, shown: Tensor, fresh: Tensor, slots: BudgetSlots, tokens: Sequence[NewToken]
) -> list[Tensor]:
    """Each row's new token takes its slot in the ring of the newest; the one that it finds there contests with the heavy tokens
    (H2O, arXiv:2306.14048, section 4.2): it takes the slot of the lightest, of equals the newest, or being no heavier is lost.

    Args:
        rule: what attention is worth; None: nothing is scored, and who leaves the ring goes to the slot that is free.
        mass: float32 `[rows, numbers x kv_heads, slots]`, changed: of tokens, and behind that with `rule.mean` how many query rows
            have seen each.
        shown: `[rows, numbers x kv_heads, n]`, what this step adds to the first n slots.
        fresh: `[rows, numbers x kv_heads, 1]`, of the new token.
        slots: who lies where.
        tokens: the fields of pages, changed, and of the new tokens.

    Returns:
        For each field what lay in the slot that was taken, `[rows, kv_heads, 1, W]`: of rows that contest the token that is lost.
    """
    if prefers_triton(mass.device):
        from calib.kernels.heavy_hitters import triton

        if triton.supports(mass, slots, tokens):
            return triton.enter_ring(rule, mass, shown, fresh, slots, tokens)
    return reference.enter_ring(rule, mass, shown, fresh, slots, tokens)
