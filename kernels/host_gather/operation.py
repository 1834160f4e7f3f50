"""Fetches tokens from host memory (SpeCache's prefetch), by the implementation for the device."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.host_gather import reference


def exchange(
    held: Tensor, chosen: Tensor, table: Tensor, page_tokens: int, reach: int, fetched: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Updates the entries of a cache of fetched tokens so that they hold the tokens `chosen`: tokens that are already there keep
    their entry, the others replace tokens that are not chosen.

    Args:
        held: token number of each entry, int32 `[rows, kv_heads, n]`, -1 if empty; no token twice. Updated.
        chosen: token numbers, int64 `[rows, kv_heads, at most n]`, in any order; -1 stands for none.
        table: pages of each row, int32 `[rows, pages]`, `page_tokens` tokens per page.
        page_tokens: tokens per page.
        reach: an upper bound of all token numbers (exclusive).
        fetched: int64 `[1]`, to which the number of new tokens is added.

    Returns:
        For every entry, `[rows, kv_heads, n]`: the page of its token and the slot in the page, int64, undefined if it is not new;
        and whether it is new and has to be fetched, bool.
    """
    if prefers_triton(held.device):
        from calib.kernels.host_gather import triton

        if triton.supports_exchange(held, chosen):
            return triton.exchange(held, chosen, table, page_tokens, fetched)
    return reference.exchange(held, chosen, table, page_tokens, reach, fetched)


def host_gather(pages: Tensor, numbers: Tensor, slots: Tensor, wanted: Tensor, into: Tensor) -> None:
    """Copies the `wanted` tokens from host pages into entries on the device. Arguments as in `reference.host_gather`."""
    if prefers_triton(into.device):
        from calib.kernels.host_gather import triton

        if triton.supports(pages, into):
            triton.host_gather(pages, numbers, slots, wanted, into)
            return
    reference.host_gather(pages, numbers, slots, wanted, into)
