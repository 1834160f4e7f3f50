"""Attention of one layer over everything it holds: pages in packed form, the exact window, and the tokens just arrived.

    tokens of a row   0 ........ attended ........ packed keys ........ before ........ after
    keys              | packed pages ............................| key window  | this forward
    values            | packed pages   | value window .......................  | this forward

A row reads keys and values from pages up to `attended`. Beyond it the values are exact while a block of keys may
already be encoded (KIVI): those keys are met in their pages, too. Tiles and parts join in one running softmax. New
tokens are attended as they arrived: encoding comes after attention, so a prompt's own attention is exact.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.attend.reference import RunningSoftmax
from calib.runtime.pages import PAGE_TOKENS
from calib.runtime.rows import Forward, Rows
from calib.runtime.stream import TILE_TOKENS, Stream

# Query rows of a KV head that are scored at once: bounds the scores of a long chunk against a tile.
QUERY_ROWS = 1024


@dataclass(frozen=True)
class Logits:
    """How a model turns q.k into logits: `scale`, then a soft cap, and a sliding window of that many tokens."""

    scale: float
    softcap: float | None = None
    sliding: int | None = None


class LayerAttention:
    """Reads one layer's two streams for some rows of the batch, all of them or one."""

    def __init__(
        self, keys: Stream, values: Stream, state: Rows, forward: Forward, rows: range, logits: Logits
    ) -> None:
        self.keys, self.values, self.state, self.forward, self.rows = keys, values, state, forward, rows
        self.logits = logits
        self.before = [forward.before[row] for row in rows]
        self.attended = [state.packed(length) for length in self.before]
        self.packed_keys = [state.keys.packed(length) for length in self.before]

    def output(self, query: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """`query [rows, heads, n, D]`, new tokens `[rows, kv_heads, n, D]` -> `[rows, heads, n, D]` in the query's dtype."""
        length, logits = query.shape[2], self.logits
        plain = logits.softcap is None and (logits.sliding is None or length <= logits.sliding)
        if plain and length > 1 and not any(self.before):
            return F.scaled_dot_product_attention(
                query, new_keys, new_values, is_causal=True, scale=logits.scale, enable_gqa=True
            )
        step = max(1, QUERY_ROWS * new_keys.shape[1] // query.shape[1])
        tiles = [query[:, :, at : at + step] for at in range(0, length, step)]
        return torch.cat([self._tile(tile, i * step, new_keys, new_values) for i, tile in enumerate(tiles)], 2)

    def _tile(self, query: Tensor, offset: int, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """Output for the queries from column `offset` on."""
        kv_heads, length = new_keys.shape[1], query.shape[2]
        # Query rows of a KV head: group-major, then the tokens of the tile.
        grouped = (query.float() * self.logits.scale).unflatten(1, (kv_heads, -1)).flatten(2, 3)
        scored = _Scorer(self, length, offset, grouped)
        softmax = RunningSoftmax.empty(grouped, new_values.shape[3])
        self._pages(scored, softmax)
        self._window(scored, softmax)
        # Later tokens of this forward are hidden, so keys past the tile's last query are left out.
        stop = offset + length
        places = scored.before + torch.arange(stop, device=query.device)
        scores = scored.exact(new_keys[:, :, :stop])
        weights = softmax.weights(scored.visible(scores, places, causal=length > 1))
        softmax.add(weights @ new_values[:, :, :stop].float())
        output: Tensor = softmax.output().unflatten(2, (-1, length)).flatten(1, 2).to(query.dtype)
        return output

    def _pages(self, scored: "_Scorer", softmax: RunningSoftmax) -> None:
        """Tokens whose key and value are packed, a tile of at most TILE_TOKENS over all rows at a time."""
        numbers = self.state.table.numbers(scored.query.device)[self.rows.start : self.rows.stop]
        stop = -(-max(self.attended) // PAGE_TOKENS)
        step = max(1, TILE_TOKENS // (len(self.rows) * PAGE_TOKENS))
        for at in range(scored.first_visible() // PAGE_TOKENS, stop, step):
            pages = numbers[:, at : min(at + step, stop)]
            places = torch.arange(at * PAGE_TOKENS, (at + pages.shape[1]) * PAGE_TOKENS, device=pages.device)
            scores = scored.packed(pages)
            if min(self.attended) < places.shape[0] + at * PAGE_TOKENS:
                limit = self.forward.tensor(f"attended.{self.rows}", self.attended, pages.device)
                scores = scores.masked_fill((places >= limit[:, None])[:, None, None], -torch.inf)
            weights = softmax.weights(scored.visible(scores, places[None]))
            by_page = weights.unflatten(-1, (-1, PAGE_TOKENS)).movedim(-2, 1)
            mixed = self.values.plan.codec.mix(by_page, self.values.pool.read(pages), self.values.head_dim).sum(1)
            softmax.add(self.values.plan.transform.fold_output(mixed, weights.sum(-1, keepdim=True)))

    def _window(self, scored: "_Scorer", softmax: RunningSoftmax) -> None:
        """Tokens whose value is exact: one slot of the value window each, their keys from the key window or from pages."""
        values, device = self.values.window, scored.query.device
        slots = values.tokens.shape[2]
        if slots == 0 or not any(self.before):
            return
        held = scored.before[:, 0]
        ring = torch.arange(slots, device=device)
        # The newest token that falls on each slot, and whether the row holds it there.
        tokens = held[:, None] - 1 - (held[:, None] - 1 - ring) % values.size
        limit = self.forward.tensor(f"attended.{self.rows}", self.attended, device)[:, None]
        packed = self.forward.tensor(f"packed.{self.rows}", self.packed_keys, device)[:, None]
        first_page = [count // PAGE_TOKENS for count in self.attended]
        reach = max(-(-stop // PAGE_TOKENS) - first for stop, first in zip(self.packed_keys, first_page, strict=True))
        places = tokens % max(1, self.keys.window.size)
        exact = scored.exact(self.keys.window.tokens[self.rows.start : self.rows.stop])
        sources = [exact]
        if any(stop > first for stop, first in zip(self.packed_keys, self.attended, strict=True)):
            numbers = [
                (self.state.table.rows[row][first : first + reach] + [0] * reach)[:reach]
                for row, first in zip(self.rows, first_page, strict=True)
            ]
            flat = [page for row in numbers for page in row]
            pages = self.forward.tensor(f"recent.{self.rows}", flat, device).view(len(self.rows), reach)
            sources.append(scored.packed(pages))
            start = self.forward.tensor(f"recent_start.{self.rows}", first_page, device)[:, None] * PAGE_TOKENS
            places = torch.where(tokens < packed, exact.shape[-1] + tokens - start, places)
        joined = torch.cat(sources, -1)
        held_here = (tokens >= limit) & (tokens >= 0)
        index = torch.where(held_here, places, torch.zeros_like(places))[:, None, None].expand(*joined.shape[:3], slots)
        scores = joined.gather(-1, index).masked_fill(~held_here[:, None, None], -torch.inf)
        weights = softmax.weights(scored.visible(scores, tokens))
        softmax.add(weights @ values.tokens[self.rows.start : self.rows.stop].float())


class _Scorer:
    """Scores of one tile of query rows against packed and exact keys, and which of them count."""

    def __init__(self, layer: LayerAttention, length: int, offset: int, query: Tensor) -> None:
        self.layer, self.query = layer, query
        self.softcap, self.sliding = layer.logits.softcap, layer.logits.sliding
        self.before = layer.forward.tensor(f"before.{layer.rows}", layer.before, query.device)[:, None]
        self.length, self.offset = length, offset
        self.folded, self.constant = layer.keys.plan.transform.fold_query(query)

    def packed(self, pages: Tensor) -> Tensor:
        """Scores of the keys in `pages [rows, n]`: `[rows, kv_heads, query rows, n * PAGE_TOKENS]`."""
        keys = self.layer.keys
        scores = keys.plan.codec.scores(self.folded[:, None], keys.pool.read(pages)).movedim(1, -2).flatten(-2)
        return self._capped(scores if self.constant is None else scores + self.constant)

    def exact(self, keys: Tensor) -> Tensor:
        """Scores of `keys [rows, kv_heads, n, D]` as they are: `[rows, kv_heads, query rows, n]`."""
        return self._capped(self.query @ keys.float().mT)

    def visible(self, scores: Tensor, places: Tensor, causal: bool = False) -> Tensor:
        """-inf where the token at `places [rows, tokens]` is later than the query or beyond its sliding window."""
        if not causal and self.sliding is None:
            return scores
        queries = self.before + self.offset + torch.arange(self.length, device=scores.device)
        queries = queries.repeat(1, scores.shape[-2] // self.length)[:, None, :, None]
        seen = places[:, None, None, :] <= queries
        if self.sliding is not None:
            seen = seen & (places[:, None, None, :] > queries - self.sliding)
        return scores.masked_fill(~seen, -torch.inf)

    def _capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def first_visible(self) -> int:
        """The earliest token that any query of the tile sees."""
        return 0 if self.sliding is None else max(0, min(self.layer.before) + self.offset - self.sliding + 1)
