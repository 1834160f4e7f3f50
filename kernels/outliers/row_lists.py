"""Outliers of rows' whole segments as attention reads them: one list of all heads', keys' by token, values' by channel.

Attention adds up what the outliers of each key's token are, and of each value's channel; so these lie side by side, whatever rule
has chosen them. A segment is cut into stretches of `span_of` tokens, and a list goes through one head after the other, stretch by
stretch. `starts` says where a stretch of a head begins.

Keys': token by token. An index is a channel, and `begins` says where each token's are.
Values': channel by channel, and of each by token. Channels may have very different numbers of outliers, and one program meets a
stretch: its lanes get as many entries each, neighbours in that order, and entries lie as lanes read them, the first of all lanes,
then the second. An index is a channel and a token of the stretch, 16 bits together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Lanes that a stretch of values is dealt to, and tokens of a stretch at most.
LANES, LONGEST = 32, 512


def span_of(channels: int) -> int:
    """Tokens of a stretch: a power of two, as many as 16 bits tell apart beside a channel."""
    return min(LONGEST, 2 ** (16 - (channels - 1).bit_length()))


@dataclass(frozen=True)
class RowLists:
    """One stream's, as they lie in the records of rows.

    Args:
        delta: distances, float16 or float32 `[records, 1, 1, E]`; unused ones are behind all others.
        index: of the same shape, in as few bytes as channels need; of values int16 without a sign, channel * span + token.
        starts: int32 `[records, kv_heads, 1, stretches + 1]`, where in the list each stretch of a head begins, and the head ends.
        begins: of keys, int16 without a sign `[records, kv_heads, 1, tokens + 1]`: how far behind the start of its stretch a token
            begins. None: they are values'.
        records: int32 `[rows]`, the rows' numbers; None: a row's is the record of its number.
        first: the segment's token that lies in slot 0.
    """

    delta: Tensor
    index: Tensor
    starts: Tensor
    begins: Tensor | None = None
    records: Tensor | None = None
    first: int = 0


@dataclass(frozen=True)
class Entries:
    """Outliers one by one, tensors of one shape; those at a distance of 0 are unused, and may be anywhere."""

    head: Tensor
    token: Tensor
    channel: Tensor
    delta: Tensor


def by_token(found: Entries, heads: int, tokens: int, channels: int) -> dict[str, Tensor]:
    """`found [E]`, of one segment, as the fields `delta [1, 1, 1, E]` and so on of keys' `RowLists`; indices int64."""
    lines = found.head * tokens + found.token
    order, counts = _sorted(lines * channels + found.channel, lines, found.delta, heads * tokens)
    ends = counts.cumsum(0).view(heads, tokens)
    begins, stretch = ends - counts.view(heads, tokens), span_of(channels)
    starts = torch.cat([begins[:, ::stretch], ends[:, -1:]], 1)
    begins = torch.cat([begins, ends[:, -1:]], 1)
    begins -= starts[:, torch.arange(tokens + 1, device=begins.device) // stretch]
    return _fields(found.delta[order], found.channel[order]) | {"begins": begins[None, :, None], "starts": _of(starts)}


def by_channel(found: Entries, heads: int, tokens: int, channels: int) -> dict[str, Tensor]:
    """The same as the fields of values' `RowLists`."""
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
    """What is in the fields of segments of up to so many tokens, entry by entry `[segments, E]`: head * tokens + token, head *
    channels + channel, both int64, and the distance, which is 0 behind a list's end."""
    delta, index = lists["delta"].flatten(1), _unsigned(lists["index"].flatten(1))
    shift = span_of(channels).bit_length() - 1  # spans are powers of two
    begins, lines = _begins(lists, shift)
    # An entry lies in the last line that has begun, by a count of begins.
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
    """What lies behind the end of a list becomes 0, where it came from a file."""
    begins, _ = _begins(lists, span_of(channels).bit_length() - 1)
    number = torch.arange(lists["delta"].shape[-1], device=begins.device)
    for name in ("delta", "index"):
        lists[name].masked_fill_((number >= begins[:, -1:])[:, None, None], 0)


def _begins(lists: Mapping[str, Tensor], shift: int) -> tuple[Tensor, int]:
    """Where each line begins in the list, `[segments, kv_heads lines]`, and how many lines a head has: tokens of keys, stretches of
    values. A line behind a list's last is empty."""
    begins, lines = lists["starts"][:, :, 0].long(), lists["starts"].shape[3]
    if "begins" in lists:
        lines = lists["begins"].shape[3]
        of_tokens = begins[..., None].expand(*begins.shape, 1 << shift).flatten(2)[:, :, :lines]
        begins = _unsigned(lists["begins"][:, :, 0]) + of_tokens
    return begins.flatten(1).cummax(1).values.clamp_max_(lists["delta"].shape[-1]), lines


def _looked_up(table: Tensor, number: Tensor) -> Tensor:
    return table.flatten().index_select(0, number.flatten()).view_as(number)


def _sorted(key: Tensor, lines: Tensor, delta: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of entries by `key`, unused ones last, and how many there are in each of `count` lines."""
    used = delta != 0
    order = key.masked_fill(~used, torch.iinfo(torch.int64).max).argsort()
    return order, torch.zeros(count, dtype=torch.int64, device=key.device).scatter_add_(0, lines, used.long())


def _dealt(rank: Tensor, count: Tensor) -> Tensor:
    """Where the entry of this rank among `count` lies: lanes have as many as each other, or one less from some lane on."""
    most = (count + LANES - 1) // LANES
    full = count - (most - 1) * LANES  # lanes that have `most`
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
