"""Fetches chosen tokens from pages in host memory, except those that are on the device already (SpeCache's prefetch); plain
torch."""

import torch
from torch import Tensor


def exchange(
    held: Tensor, chosen: Tensor, table: Tensor, page_tokens: int, reach: int, fetched: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `operation.exchange`."""
    before, chosen = held.long(), torch.nn.functional.pad(chosen, (0, held.shape[2] - chosen.shape[2]), value=-1)
    marks = torch.zeros(2, *held.shape[:2], reach + 1, dtype=torch.bool, device=held.device)
    marks.scatter_(-1, torch.stack([before, chosen]) + 1, True)[..., 0] = False  # remove the marks of -1
    was, will = marks
    stays = will.gather(-1, before + 1)
    arrives = ~was.gather(-1, chosen + 1) & (chosen >= 0)
    # The i-th new token takes the i-th free entry; there are never more new tokens than free entries.
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
        pages: `[pages, kv_heads, page_tokens, W]`, with key and value of a token in one row: host memory that is mapped to the
            device, or ordinary host memory.
        numbers: page of each entry's token, int64 `[rows, kv_heads, n]`; any number if it is not wanted.
        slots: the token's slot in its page, int64 of the same shape.
        wanted: entries to copy, bool of the same shape.
        into: `[rows, kv_heads, n, W]`, updated where `wanted`.
    """
    if into.device.type == "cpu":
        row, head, entry = wanted.nonzero(as_tuple=True)
        into[row, head, entry] = pages[numbers[row, head, entry], head, slots[row, head, entry]]
        return
    # The number of wanted entries is not known without a synchronisation, so all are read; unwanted ones read one common row.
    head = torch.arange(into.shape[1], device=pages.device)[:, None]
    numbers, slots = (part.masked_fill(~wanted, 0).to(pages.device) for part in (numbers, slots))
    found = pages[numbers, head, slots].to(into.device)
    torch.where(wanted[..., None], found, into, out=into)
