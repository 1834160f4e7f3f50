"""Outliers of a row's whole segment as one list for all heads, sorted as attention reads it: keys by token, values by channel.

Attention sums over the outliers of each token (keys) or of each channel (values), so these are stored together. A segment is
divided into stretches of `span_of` tokens; a list has head after head, and within a head stretch after stretch. `starts` has the
offset of each stretch.

Lists of keys are sorted by token. An index is a channel, and `begins` has the offset of each token.
Lists of values are sorted by channel, then by token. Channels may have very different numbers of outliers, and a program handles a
stretch: each lane gets the same number of consecutive entries, which are stored in the order in which lanes read them, the first
entries of all lanes, then the second, and so on. An index combines a channel and a token of the stretch in 16 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Lanes that share the entries of a stretch of values, and most tokens of a stretch.
LANES, LONGEST = 32, 512


def span_of(channels: int) -> int:
    """Tokens of a stretch: the largest power of two, `LONGEST` at most, so that a channel and a token fit 16 bits together."""
    return min(LONGEST, 2 ** (16 - (channels - 1).bit_length()))


@dataclass(frozen=True)
class RowLists:
    """Lists of one stream (keys or values), one list per record (page with the parameters of a row's first segment).

    Args:
        delta: what each outlier adds to the decoded element, float16 or float32 `[records, 1, 1, E]`; unused entries come last.
        index: of the same shape; for keys the channel, in as few bytes as channels need, for values channel * span + token as
            unsigned int16.
        starts: offset in the list of each stretch of a head, and the head's end, int32 `[records, kv_heads, 1, stretches + 1]`.
        begins: for keys, offset of each token from the start of its stretch, unsigned int16 `[records, kv_heads, 1, tokens + 1]`;
            None for values.
        records: record number of each row, int32 `[rows]`; None: row i has record i.
        first: number in the segment of the token in slot 0.
    """

    delta: Tensor
    index: Tensor
    starts: Tensor
    begins: Tensor | None = None
    records: Tensor | None = None
    first: int = 0


@dataclass(frozen=True)
class Entries:
    """Unsorted outliers as tensors of one shape; entries with delta 0 are unused and may be anywhere."""

    head: Tensor
    token: Tensor
    channel: Tensor
    delta: Tensor


def by_token(found: Entries, heads: int, tokens: int, channels: int) -> dict[str, Tensor]:
    """Sorts the outliers `found [E]` of one segment of keys; returns the fields of `RowLists` by name, with int64 indices."""
    lines = found.head * tokens + found.token
    order, counts = _sorted(lines * channels + found.channel, lines, found.delta, heads * tokens)
    ends = counts.cumsum(0).view(heads, tokens)
    begins, stretch = ends - counts.view(heads, tokens), span_of(channels)
    starts = torch.cat([begins[:, ::stretch], ends[:, -1:]], 1)
    begins = torch.cat([begins, ends[:, -1:]], 1)
    begins -= starts[:, torch.arange(tokens + 1, device=begins.device) // stretch]
    return _fields(found.delta[order], found.channel[order]) | {"begins": begins[None, :, None], "starts": _of(starts)}


def by_channel(found: Entries, heads: int, tokens: int, channels: int) -> dict[str, Tensor]:
    """As `by_token`, for a segment of values."""
    span = span_of(channels)
    stretches = -(-tokens // span)
    lines = found.head * stretches + found.token // span
    index = found.channel * span + found.token % span
    order, counts = _sorted(lines * (channels * span) + index, lines, found.delta, heads * stretches)
    ends = counts.cumsum(0)
    begins = ends - counts
    number = torch.arange(len(order), device=order.device)
    line = torch.searchsorted(ends, number, right=True).clamp_max(len(ends) - 1)
    dealt = begins[line] + _dealt(number - begins[line], counts[line])
    to = torch.where(number < ends[-1], dealt, number)
    delta, cells = (torch.empty_like(part).scatter_(0, to, part[order]) for part in (found.delta, index))
    starts = torch.cat([begins.view(heads, stretches), ends.view(heads, stretches)[:, -1:]], 1)
    return _fields(delta, cells) | {"starts": _of(starts)}


def numbers_of(lists: Mapping[str, Tensor], channels: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unpacks the fields of segments of up to `tokens` tokens: for each entry, `[segments, E]`, head * tokens + token and head *
    channels + channel, both int64, and delta, which is 0 behind a list's end."""
    delta, index = lists["delta"].flatten(1), _unsigned(lists["index"].flatten(1))
    shift = span_of(channels).bit_length() - 1  # spans are powers of two
    begins, lines = _begins(lists, shift)
    # An entry belongs to the last line that begins at or before it: a cumulative count of beginnings gives its number.
    begun = torch.zeros(len(delta), delta.shape[1] + 1, dtype=torch.int64, device=delta.device)
    line = begun.scatter_add_(1, begins, torch.ones_like(begins))[:, :-1].cumsum(1).sub_(1).clamp_min_(0)
    head = torch.arange(begins.shape[1] // lines, device=delta.device)[:, None]
    first = torch.arange(lines, device=delta.device) << (0 if "begins" in lists else shift)
    token = _looked_up(first.clamp_max_(max(tokens - 1, 0)) + head * tokens, line)
    channel = _looked_up((head * channels).expand(-1, lines), line)
    if "begins" in lists:
        return token, channel.add_(index), delta
    return token.add_(index & ((1 << shift) - 1)), channel.add_(index >> shift), delta


def cleared_behind(lists: Mapping[str, Tensor], channels: int) -> None:
    """Sets the entries behind the end of each list to 0, in place; lists from a file may hold anything there."""
    begins, _ = _begins(lists, span_of(channels).bit_length() - 1)
    number = torch.arange(lists["delta"].shape[-1], device=begins.device)
    for name in ("delta", "index"):
        lists[name].masked_fill_((number >= begins[:, -1:])[:, None, None], 0)


def _begins(lists: Mapping[str, Tensor], shift: int) -> tuple[Tensor, int]:
    """Offset of each line (a token of keys, a stretch of values) in the list, `[segments, kv_heads * lines]`, and the number of
    lines per head. Lines behind the last are empty."""
    begins, lines = lists["starts"][:, :, 0].long(), lists["starts"].shape[3]
    if "begins" in lists:
        lines = lists["begins"].shape[3]
        of_tokens = begins[..., None].expand(*begins.shape, 1 << shift).flatten(2)[:, :, :lines]
        begins = _unsigned(lists["begins"][:, :, 0]) + of_tokens
    return begins.flatten(1).cummax(1).values.clamp_max_(lists["delta"].shape[-1]), lines


def _looked_up(table: Tensor, number: Tensor) -> Tensor:
    return table.flatten().index_select(0, number.flatten()).view_as(number)


def _sorted(key: Tensor, lines: Tensor, delta: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices that sort the entries by `key`, unused ones last, and the number of used entries in each of `count` lines."""
    used = delta != 0
    order = key.masked_fill(~used, torch.iinfo(torch.int64).max).argsort()
    return order, torch.zeros(count, dtype=torch.int64, device=key.device).scatter_add_(0, lines, used.long())


def _dealt(rank: Tensor, count: Tensor) -> Tensor:
    """Offset in its stretch of the entry with this rank among `count`: consecutive ranks go to one lane, and all lanes have equally
    many entries, or one less from some lane on."""
    most = (count + LANES - 1) // LANES
    full = count - (most - 1) * LANES  # number of lanes with `most` entries
    behind = rank - full * most
    fewer = (most - 1).clamp_min(1)
    lane = torch.where(behind < 0, rank // most.clamp_min(1), full + behind // fewer)
    turn = torch.where(behind < 0, rank % most.clamp_min(1), behind % fewer)
    return turn * LANES + lane


def _fields(delta: Tensor, index: Tensor) -> dict[str, Tensor]:
    index = index.masked_fill(delta == 0, 0)
    return {"delta": delta[None, None, None], "index": index[None, None, None]}


def _of(starts: Tensor) -> Tensor:
    return starts[None, :, None]


def _unsigned(index: Tensor) -> Tensor:
    return index.long() & 0xFFFF if index.dtype == torch.int16 else index.long()
