"""Tokens out of host memory, by whichever form of the operation the device runs."""

from torch import Tensor

from calib.kernels.dispatch import prefers_triton
from calib.kernels.host_gather import reference


def exchange(
    held: Tensor, chosen: Tensor, table: Tensor, page_tokens: int, reach: int, fetched: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lets a fixed number of entries hold the tokens `chosen`, in the room of those not chosen; one that is there stays there.

    Args:
        held: int32 `[rows, kv_heads, n]`, the token in each entry, -1 where there is none; no token twice. Changed.
        chosen: int64 `[rows, kv_heads, at most n]`, in any order; -1 is none.
        table: int32 `[rows, pages]`, the page of every `page_tokens` tokens of a row.
        page_tokens: tokens of a page.
        reach: more than any token.
        fetched: int64 `[1]`, to which the number of new tokens is added.

    Returns:
        Of every entry, `[rows, kv_heads, n]`, the page and the slot in it of its token, int64, anything where it is not new; and
        bool: which are new and have to be fetched.
    """
    if prefers_triton(held.device):
        from calib.kernels.host_gather import triton

        if triton.supports_exchange(held, chosen):
            return triton.exchange(held, chosen, table, page_tokens, fetched)
    return reference.exchange(held, chosen, table, page_tokens, reach, fetched)


def host_gather(pages: Tensor, numbers: Tensor, slots: Tensor, wanted: Tensor, into: Tensor) -> None:
    """Copies tokens from host pages into entries on the device.

    Args:
        pages: `[pages, kv_heads, page_tokens, W]`, key and value of a token in one row: host memory as the device sees it, or
            ordinary host memory.
        numbers: int64 `[rows, kv_heads, n]`, the page of each entry's token; any number where nothing is wanted.
        slots: int64 of the same shape, the token's slot in its page.
        wanted: bool of the same shape.
        into: `[rows, kv_heads, n, W]`, changed where `wanted`.
    """
    if prefers_triton(into.device):
        from calib.kernels.host_gather import triton

        if triton.supports(pages, into):
            triton.host_gather(pages, numbers, slots, wanted, into)
            return
    reference.host_gather(pages, numbers, slots, wanted, into)
