"""Outliers: the entries that would widen the range of their quantisation group, stored exactly (GEAR, arXiv:2403.05527, eq. 4)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.outliers.reference import extremes, farthest_beyond, first_beyond, in_order, sparse_product
from calib.kernels.outliers.row_lists import (
    Entries,
    RowLists,
    by_channel,
    by_token,
    cleared_behind,
    numbers_of,
    span_of,
)
from calib.kernels.to_half import stored
from calib.runtime.messages.printable import printable
from calib.runtime.paging.field import Block, Field
from calib.runtime.paging.stored_values import Cells, Indices
from calib.runtime.stages.contract import Segment

# A row, whose entries are ranked: the tokens of a channel in a segment, the channels of a token, or a segment's whole matrix.
LowRankTerm = Literal["tokens", "channels", "matrix"]

FIELDS = ("delta", "tokens", "channels", "index", "starts", "begins")


class Found(NamedTuple):
    """Outliers of rows `[1, h, m, N]`: positions int64 `[1, h, m, 2k]`, slots in use (None: all), and all of them as a mask.

    `overflowed_outliers` counts the entries beyond a calibrated threshold for which no slot was left.
    """

    positions: Tensor
    used: Tensor | None
    mask: Tensor
    overflowed_outliers: Tensor | None


@dataclass(frozen=True, eq=False)
class Outliers:
    """The s/2 largest and s/2 smallest entries of every row, at least one of each: replaced before encoding, exact when decoded.

    An outlier is stored as its difference ("distance") from what the other parts decode there, rounded to float16, so that
    attention adds it independently of the codes.

    Args:
        share: s, in (0, 1].
        ranked: what a row is: a channel's "tokens", a token's "channels", or the "matrix" of a segment.
        across_heads: rows have the channels of all heads (a whole matrix always does).
        fill: the replacement of an outlier: the mean of the row's remaining entries, or zero.
        low, high: thresholds of the artifact, broadcasting against `[kv_heads, T, D]`: then entries are not ranked, and the first
            ones beyond a threshold are taken, by position.
        farthest: of the entries beyond the thresholds the farthest are taken instead, at either end.
        of_row: the segment is a row's, whose outliers are stored in the order of the kernels (`RowLists`), unless of a matrix.
        heads: KV heads of the layer; needed where rows have the channels of all heads and tokens are in no segment.
    """

    share: float
    ranked: LowRankTerm
    across_heads: bool = False
    fill: Literal["mean", "zero"] = "mean"
    low: Tensor | None = None
    high: Tensor | None = None
    farthest: bool = False
    of_row: bool = False
    heads: int | None = None

    def __post_init__(self) -> None:
        if type(self.share) not in (float, int) or not 0 < self.share <= 1:
            raise ValueError(f"outliers must be a share from 0 to 1, got {printable(self.share)}; 0.02 is usual")

    @property
    def listed(self) -> bool:
        """Whether outliers are one list for a segment, not some for each token."""
        return self.ranked != "channels" or self.of_row

    @property
    def joins_heads(self) -> bool:
        """Whether the heads of a layer are ranked together."""
        return self._across

    def count(self, length: int) -> int:
        """Outliers at each end of a row."""
        return min(max(1, math.floor(self.share / 2 * length + 1e-9)), length // 2)

    def fields(self, head_dim: int, fp32_params: bool, segment: Segment) -> dict[str, Field]:
        """Fields of distances and positions: 2k for each token, or 2k D (a whole matrix: 2k) for the segment; k is `count`."""
        if self._in_row_lists:
            return self._row_fields(head_dim, fp32_params, segment)
        across = (self.heads or segment.heads) if self._across else 1
        length = {"tokens": segment.tokens, "channels": head_dim * across, "matrix": segment.tokens * head_dim * across}
        width = 2 * self.count(length[self.ranked]) * (head_dim if self.ranked == "tokens" else 1)
        rows, dtype = None if self.listed else 1, torch.float32 if fp32_params else torch.float16
        fields = {"delta": Field(rows, width, dtype, "outliers", shared=self._across)}
        positions = {"tokens": segment.tokens} if self.listed else {}
        positions |= {"channels": head_dim * across} if self.ranked != "tokens" else {}
        return fields | {
            name: Field(rows, width, _index(size), "outliers", self._across, Indices(size))
            for name, size in positions.items()
        }

    def _row_fields(self, head_dim: int, fp32_params: bool, segment: Segment) -> dict[str, Field]:
        """The fields of `RowLists`."""
        if self.ranked == "tokens":
            entries = 2 * self.count(segment.tokens) * segment.heads * head_dim
        else:
            of_token, parts = (head_dim * segment.heads, 1) if self._across else (head_dim, segment.heads)
            entries = 2 * self.count(of_token) * parts * segment.tokens
        dtype, span = torch.float32 if fp32_params else torch.float16, span_of(head_dim)
        stretches = -(-segment.tokens // span)
        found = {
            "delta": Field(None, entries, dtype, "outliers", shared=True),
            "starts": Field(None, stretches + 1, torch.int32, "outliers", values=Indices(entries + 1)),
        }
        if self.ranked == "tokens":
            index = Field(None, entries, _index(head_dim), "outliers", True, Indices(head_dim))
            return found | {"index": index, "begins": Field(None, segment.tokens + 1, torch.int16, "outliers")}
        return found | {"index": Field(None, entries, torch.int16, "outliers", True, Cells(head_dim, span))}

    def wrong(self, fields: Mapping[str, Tensor], channels: int, tokens: int) -> str | None:
        """An error message if these fields of a segment of `tokens` tokens have outliers of tokens beyond it; else None."""
        if "tokens" in fields:
            return Indices(tokens).wrong(fields["tokens"])
        if not self._in_row_lists:
            return None
        token, _, delta = numbers_of(fields, channels, most := 2**31)
        return Indices(tokens).wrong((token % most).masked_fill(delta == 0, 0))

    def ordered(self, fields: Mapping[str, Tensor], channels: int) -> None:
        """Sorts the lists in `fields [..., n channels]`, in place, into the order in which they are read; for fields from a
        file."""
        if self._in_row_lists:
            cleared_behind(fields, channels)
        if self.ranked != "tokens" or self.of_row:
            return
        lists = [fields[name].unflatten(-1, (-1, channels)).mT for name in ("tokens", "delta")]
        tokens, delta = in_order(_positions(lists[0]), lists[1])
        for own, found in zip(lists, (tokens, delta), strict=True):
            own.copy_(found)

    def terms(
        self, pages: Mapping[str, Tensor], lists: Mapping[str, Tensor], records: Tensor | None
    ) -> PageTerms | None:
        """The outliers as kernels read them: those of tokens and of pages from `pages`, those of rows from `lists`, at `records`.
        None for those of a whole matrix, which no kernel reads."""
        if self.ranked == "matrix":
            return None
        if self._in_row_lists and lists:
            begins = lists.get("begins")
            return PageTerms(lists=RowLists(lists["delta"], lists["index"], lists["starts"], begins, records))
        if self.ranked == "tokens":
            return PageTerms(pages["delta"], pages["tokens"], listed=True)
        return PageTerms(pages["delta"], pages["channels"], across=self._across)

    def find(self, x: Tensor) -> Found:
        """The outliers of `x [1, kv_heads, T, D]`, float32."""
        rows = self._rows(x)
        count, used, overflowed_outliers = self.count(rows.shape[-1]), None, None
        if self.low is None or self.high is None:
            positions = extremes(rows.contiguous(), count)
            mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, positions, True)
        else:
            low, high = (self._row_thresholds(part, x) for part in (self.low, self.high))
            if self.farthest:
                positions, used, overflowed_outliers = farthest_beyond(rows, low, high, 2 * count)
            else:
                positions, used, overflowed_outliers = first_beyond(rows, low, high, count)
            # Unused slots point at the first entry and must not mark it.
            marks = torch.zeros_like(rows, dtype=torch.uint8).scatter_add_(-1, positions, used.to(torch.uint8))
            mask = marks.view(torch.bool)
        return Found(positions, used, mask, overflowed_outliers)

    def filled(self, x: Tensor, found: Found) -> Tensor:
        """`x` with its outliers replaced."""
        rows = self._rows(x)
        rest = rows.masked_fill(found.mask, 0)
        if self.fill == "mean":
            left = (~found.mask).sum(-1, keepdim=True)
            rest = torch.where(found.mask, rest.sum(-1, keepdim=True) / left.clamp_min(1), rest)
        return self._tokens(rest, x)

    def cleared(self, x: Tensor, found: Found) -> Tensor:
        """`x` with 0 at the outliers."""
        return self._tokens(self._rows(x).masked_fill(found.mask, 0), x)

    def encode(self, distance: Tensor, found: Found, fp32_params: bool) -> Block:
        """Fields of a segment: `distance [1, kv_heads, T, D]` is the tokens minus what the other parts decode."""
        rows, (heads, _, channels) = self._rows(distance), distance.shape[1:]
        delta = rows.gather(-1, found.positions)
        delta = stored(delta if found.used is None else delta * found.used, fp32_params)
        if self._in_row_lists:
            listed = by_token if self.ranked == "tokens" else by_channel
            return listed(self._found(found.positions, delta, channels), *distance.shape[1:])
        positions = found.positions.int()
        if self.ranked == "tokens":  # [1, heads, D, 2k] -> a list with channels running fastest
            positions, delta = in_order(positions, delta)
            return {name: part.mT.flatten(2)[:, :, None] for name, part in (("delta", delta), ("tokens", positions))}
        if self.ranked == "channels":
            return {"delta": delta, "channels": positions}
        width = channels * heads
        return {"delta": delta, "channels": positions % width, "tokens": positions // width}

    def decode(self, block: Block, like: Tensor) -> Tensor:
        """The distances at their positions, 0 elsewhere: float32 in the shape of `like [..., kv_heads, T, D]`."""
        heads, tokens, channels = like.shape[-3:]
        stored = ((name, part) for name, part in block.items() if name in FIELDS)
        tile = {name: part.view(like.shape[:-3].numel(), *part.shape[-3:]).mT for name, part in stored}
        token, channel, delta = self._entries(tile, heads, tokens, channels)
        whole, positions = delta.new_ones(len(delta), 1, 1), token * channels + channel % channels
        found = sparse_product(whole, torch.zeros_like(positions), positions, delta, heads * tokens * channels)
        return found.view(like.shape)

    def scores(self, query: Tensor, tile: Block, tokens: int) -> Tensor:
        """What outliers among keys add to the logits: `query [rows, kv_heads, n, D]` -> `[rows, kv_heads, n, tokens]`."""
        heads, channels = query.shape[1], query.shape[3]
        token, channel, delta = self._entries(tile, heads, tokens, channels)
        found = sparse_product(_merged(query), channel, token, delta, heads * tokens)
        return found.unflatten(-1, (heads, tokens)).transpose(1, 2)

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """What outliers among values add to the output: `weights [rows, kv_heads, n, T]` -> `[rows, kv_heads, n, channels]`."""
        heads, tokens = weights.shape[1], weights.shape[3]
        token, channel, delta = self._entries(tile, heads, tokens, channels)
        found = sparse_product(_merged(weights), token, channel, delta, heads * channels)
        return found.unflatten(-1, (heads, channels)).transpose(1, 2)

    def _entries(self, tile: Block, heads: int, tokens: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
        """All entries of a tile that holds `tokens` tokens, `[rows, E]` each: head and token as one number, head and channel
        as one number, and the distance."""
        if self._in_row_lists:
            token, channel, delta = numbers_of({name: part.mT for name, part in tile.items()}, channels, tokens)
            return token, channel, delta.float()
        delta = tile["delta"].float()
        head = torch.arange(delta.shape[1], device=delta.device)[:, None, None]
        if self.ranked == "tokens":
            channel = torch.arange(delta.shape[2], device=delta.device)[:, None] % channels + head * channels
        else:
            channel = _positions(tile["channels"]) + head * channels
        if self._across:  # a channel number over all heads contains the head
            head = channel // channels
        last = torch.arange(delta.shape[3], device=delta.device)  # of a token, or of a segment
        token = last if self.ranked == "channels" else _positions(tile["tokens"]) + last * (tokens // delta.shape[3])
        token = token + head * tokens
        return token.expand(delta.shape).flatten(1), channel.expand(delta.shape).flatten(1), delta.flatten(1)

    def _found(self, positions: Tensor, delta: Tensor, channels: int) -> Entries:
        """Entries of rows `[1, h, m, 2k]` one by one."""
        _, head, line, _ = torch.meshgrid(*(torch.arange(n, device=delta.device) for n in delta.shape), indexing="ij")
        token, channel = (positions, line) if self.ranked == "tokens" else (line, positions)
        if self._across:
            head, channel = positions // channels, positions % channels
        return Entries(*(part.flatten() for part in (head, token, channel, delta)))

    @property
    def _in_row_lists(self) -> bool:
        return self.of_row and self.ranked != "matrix"

    @property
    def _across(self) -> bool:
        return self.across_heads or self.ranked == "matrix"

    def _rows(self, x: Tensor) -> Tensor:
        """`x [1, kv_heads, T, D]` as rows `[1, h, m, N]`, the ranked entries along the last axis."""
        if self.ranked == "tokens":
            return x.mT
        if not self._across:
            return x
        merged = x.transpose(1, 2).flatten(2)[:, None]
        return merged if self.ranked == "channels" else merged.flatten(2)[:, :, None]

    def _tokens(self, rows: Tensor, like: Tensor) -> Tensor:
        """Undoes `_rows`, in the shape of `like`."""
        if self.ranked == "tokens":
            return rows.mT.contiguous()
        if not self._across:
            return rows
        return rows.view(like.shape[0], like.shape[2], like.shape[1], like.shape[3]).transpose(1, 2).contiguous()

    def _row_thresholds(self, thresholds: Tensor, x: Tensor) -> Tensor:
        """`thresholds` in a shape that broadcasts against the rows of `x`."""
        if thresholds.numel() == 1:
            return thresholds.view(1, 1, 1, 1)
        return thresholds.mT[None] if self.ranked == "tokens" else self._rows(thresholds.expand(x.shape))


def _merged(x: Tensor) -> Tensor:
    """`[rows, kv_heads, n, m]` -> `[rows, n, kv_heads m]`."""
    return x.transpose(1, 2).flatten(2)


def _index(length: int) -> torch.dtype:
    """The smallest dtype for indices below `length`; int16 is read as unsigned."""
    return torch.uint8 if length <= 2**8 else torch.int16 if length <= 2**16 else torch.int32


def _positions(index: Tensor) -> Tensor:
    """Stored positions as int64."""
    return index.long() & 0xFFFF if index.dtype == torch.int16 else index.long()
