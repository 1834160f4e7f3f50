"""Chosen tokens out of pages in host memory, and only those that are not on the device already (SpeCache's prefetch)."""

import torch
from torch import Tensor


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
    before, chosen = held.long(), torch.nn.functional.pad(chosen, (0, held.shape[2] - chosen.shape[2]), value=-1)
    marks = torch.zeros(2, *held.shape[:2], reach + 1, dtype=torch.bool, device=held.device)
    marks.scatter_(-1, torch.stack([before, chosen]) + 1, True)[..., 0] = False  # where -1 has left its mark
    was, will = marks
    stays = will.gather(-1, before + 1)
    arrives = ~was.gather(-1, chosen + 1) & (chosen >= 0)
    # The i-th token that arrives takes the i-th entry that is free; there are never more of those.
    free, arriving = stays.sort(dim=-1, stable=True).indices, (~arrives).sort(dim=-1, stable=True).indices
    tokens, comes = chosen.gather(-1, arriving), arrives.gather(-1, arriving)
    kept = before.masked_fill(~stays, -1)
    entries = kept.scatter(-1, free, torch.where(comes, tokens, kept.gather(-1, free)))
    new = torch.zeros_like(stays).scatter_(-1, free, comes)
    at = entries.masked_fill(~new, 0)
    numbers = table.long()[:, None].expand(-1, held.shape[1], -1).gather(2, at // page_tokens)
    held.copy_(entries)
    fetched += new.sum()
    return numbers, at % page_tokens, new


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
    if into.device.type == "cpu":
        row, head, entry = wanted.nonzero(as_tuple=True)
        into[row, head, entry] = pages[numbers[row, head, entry], head, slots[row, head, entry]]
        return
    # Without waiting for the device nobody knows how many are wanted: the others read one and the same row.
    head = torch.arange(into.shape[1], device=pages.device)[:, None]
    numbers, slots = (part.masked_fill(~wanted, 0).to(pages.device) for part in (numbers, slots))
    found = pages[numbers, head, slots].to(into.device)
    torch.where(wanted[..., None], found, into, out=into)
