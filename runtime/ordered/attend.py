"""Attention of one layer over everything it holds: pages in packed form, the exact window, and the tokens just arrived.

    tokens of a row   0 ........ attended ........ packed keys ........ before ........ after
    keys              | packed pages ............................| key window  | this forward
    values            | packed pages   | value window .......................  | this forward

A row reads keys and values from pages up to `attended`. Beyond it the values are exact while a block of keys may
already be encoded (KIVI): those keys are met in their pages, too. Tiles and parts join in one running softmax. New
tokens are attended as they arrived: encoding comes after attention, so a prompt's own attention is exact.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.attend.operation import PackedStream, attend_pages, served
from calib.kernels.attend.reference import RunningSoftmax
from calib.kernels.dispatch import prefers_triton
from calib.runtime.beside import Beside, newest
from calib.runtime.logits import Logits, masked
from calib.runtime.ordered.reading import Asked, LevelStep, Reading
from calib.runtime.ordered.rows import OrderedRows
from calib.runtime.ordered.stream import Stream
from calib.runtime.pages import PAGE_TOKENS, Pages
from calib.runtime.rows import Forward
from calib.runtime.stages.codec.in_pages import packed_stream

# Query rows of a KV head that are scored at once: bounds the scores of a long chunk against a tile.
QUERY_ROWS = 1024


@dataclass
class LayerAttention:
    """What one layer holds for the rows `rows` of the batch, and how it is read."""

    keys: Stream
    values: Stream
    state: OrderedRows
    forward: Forward
    rows: range
    logits: Logits
    beside: Beside | None = None

    def output(self, query: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """Attention of queries none of whose columns is padding.

        `query [rows, heads, n, D]`, new tokens `[rows, kv_heads, n, D]` -> `[rows, heads, n, D]` in the query's dtype.
        """
        length, logits = query.shape[2], self.logits
        plain = logits.softcap is None and (logits.sliding is None or length <= logits.sliding)
        if plain and length > 1 and not any(self.forward.before[row] for row in self.rows):
            return F.scaled_dot_product_attention(
                query, new_keys, new_values, is_causal=True, scale=logits.scale, enable_gqa=True
            )
        step = max(1, QUERY_ROWS * new_keys.shape[1] // query.shape[1])
        outputs = []
        for at in range(0, length, step):
            tile = query[:, :, at : at + step] if length > step else query
            # Query rows of a KV head: group-major, then the tokens of the tile.
            grouped = (tile.float() * logits.scale).unflatten(1, (new_keys.shape[1], -1)).flatten(2, 3)
            windows = (self.keys.window.tokens.shape[2], self.values.window.tokens.shape[2])
            queries = range(at, at + tile.shape[2])
            asked = Asked(self.rows, queries, logits.sliding, windows, self.keys.tile_tokens, query.device)
            in_one = prefers_triton(query.device) and served(grouped.shape[2], *self._streams())
            level = None if in_one or self.beside is not None else LevelStep.of(self.state, self.forward, asked)
            if level is not None:
                mixed = self._level_step(level, grouped, new_keys, new_values)
            else:
                reading = Reading.of(self.state, self.forward, asked)
                mixed = self._general(reading, len(queries), grouped, new_keys, new_values, in_one)
            outputs.append(mixed.unflatten(2, (-1, tile.shape[2])).flatten(1, 2).to(query.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _level_step(self, step: LevelStep, query: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """A decode step of rows that hold equally much: slices do what index and masks do in general."""
        scored, softmax = _Scorer(self.keys, query), RunningSoftmax()
        for pages in step.tiles:
            softmax.add(self._mix(softmax.weights(self.logits.capped(scored.packed(pages))), pages))
        exact = scored.exact(torch.cat([self._window(self.keys)[:, :, : step.exact_keys], new_keys], 2))
        parts = [exact]
        if step.last is not None:
            packed = scored.packed(step.last_keys)
            parts = [packed[..., : step.read], exact[..., : step.exact_keys], packed[..., step.recent], exact[..., -1:]]
        weights = softmax.last_weights(self.logits.capped(torch.cat(parts, -1) if len(parts) > 1 else exact))
        exact_values = torch.cat([self._window(self.values)[:, :, : step.slots], new_values], 2)
        softmax.add(weights[..., step.read :] @ exact_values.float())
        if step.last is not None:
            of_tile = F.pad(weights[..., : step.read], (0, step.last_tokens - step.read))
            softmax.add(self._mix(of_tile, step.last))
        return softmax.output()

    def _streams(self) -> tuple[PackedStream | None, PackedStream | None]:
        """Keys and values as a kernel reads them."""
        keys, values = (packed_stream(own.plan.codec, own.pool, own.head_dim) for own in (self.keys, self.values))
        return keys, values

    def _in_one(
        self, reading: Reading, scored: "_Scorer", softmax: RunningSoftmax
    ) -> list[tuple[slice | Tensor, Tensor]]:
        """Takes in all packed tokens by one kernel; their places and scores, where something is asked about them."""
        (keys, values), stretch, beside = self._streams(), reading.stretch, self.beside
        if stretch is None:
            return []
        assert keys is not None and values is not None
        slots = slice(reading.starts[0], reading.starts[0] + stretch.table.shape[1] * PAGE_TOKENS)
        if beside is not None:
            stretch = replace(stretch, hidden=beside.hides(slots)[:, :, 0])
        found = attend_pages(
            scored.folded, keys, values, stretch, scored.constant, self.logits.softcap,
            scored=beside is not None and beside.asks, precise=self.values.window.tokens.dtype == torch.float32,
        )  # fmt: skip
        softmax.join(found.top, found.mass, self.values.plan.transform.fold_output(found.mixed, found.mass))
        return [] if found.scores is None else [(slots, found.scores)]

    def _general(
        self, reading: Reading, queries: int, query: Tensor, new_keys: Tensor, new_values: Tensor, in_one: bool
    ) -> Tensor:
        """Any rows, several `queries` columns, sliding windows, pairs beside; `in_one`: all packed tokens by one kernel."""
        new_keys, new_values = new_keys[:, :, reading.new], new_values[:, :, reading.new]
        scored, softmax, beside = _Scorer(self.keys, query), RunningSoftmax(), self.beside
        met = self._in_one(reading, scored, softmax) if in_one else []
        tiles, taken = ([], reading.last_tokens) if in_one else (reading.tiles, 0)
        for (pages, hidden), start in zip(tiles[:-1], reading.starts, strict=False):
            scores = self.logits.capped(scored.packed(pages))
            stretch = slice(start, start + scores.shape[-1])
            scores = masked(scores, hidden if beside is None else _either(hidden, beside.hides(stretch)))
            softmax.add(self._mix(softmax.weights(scores), pages))
            met.append((stretch, scores))
        # The last tile, the window, the new tokens and what lies beside are one part: most caches are no longer than that.
        parts = [scored.packed(pages) for pages, _ in tiles[-1:]]
        tile = sum(part.shape[-1] for part in parts)
        if reading.window is not None:
            sources = scored.exact(self._window(self.keys))
            if reading.recent is not None:
                sources = torch.cat([sources, scored.packed(reading.recent)], -1)
            parts.append(sources.gather(-1, reading.window.expand(*sources.shape[:3], -1)))
        window = sum(part.shape[-1] for part in parts) - tile
        parts.append(scored.exact(new_keys))
        hidden, last, sizes = reading.hidden, reading.last[..., taken:], [tile, window, new_keys.shape[2]]
        hidden = None if hidden is None else hidden[..., taken:]
        if beside is not None:
            parts.append(scored.exact(beside.keys))
            sizes.append(beside.keys.shape[2])
            hidden = self._hidden_beside(hidden, last, reading.back, beside)
        scores = masked(self.logits.capped(torch.cat(parts, -1)), hidden)
        of_tile, of_window, of_new, *of_beside = softmax.weights(scores).split(sizes, -1)
        softmax.add(of_new @ new_values.float())
        if window:
            softmax.add(of_window @ self._window(self.values).float())
        if tile:
            softmax.add(self._mix(of_tile, tiles[-1][0]))
        if beside is not None:
            softmax.add(of_beside[0] @ beside.values.float())
            if beside.asks:
                heads = beside.places.shape[1]
                met.append((torch.cat([last.expand(-1, heads, -1), beside.places], -1), scores))
                normaliser = newest(softmax.normaliser(), query.shape[2] // queries)
                for places, part in met:
                    beside.add(places, part, normaliser)
        return softmax.output()

    @staticmethod
    def _hidden_beside(hidden: Tensor | None, last: Tensor, back: Tensor | None, beside: Beside) -> Tensor:
        """The mask of the last part, bool `[rows, kv_heads, n or 1, tokens]`: tokens that are attended beside are hidden."""
        held, apart = _either(hidden, beside.hides(last)), beside.hidden(back)
        queries = max(held.shape[2], apart.shape[2])
        return torch.cat([part.expand(-1, -1, queries, -1) for part in (held, apart)], -1)

    def _window(self, stream: Stream) -> Tensor:
        if len(self.rows) == stream.window.tokens.shape[0]:
            return stream.window.tokens
        return stream.window.tokens[self.rows.start : self.rows.stop]

    def _mix(self, weights: Tensor, pages: Pages) -> Tensor:
        """Weighted sum of the values in `pages`."""
        mixed = self.values.plan.codec.mix(weights, self.values.pool.read(pages), self.values.head_dim)
        return self.values.plan.transform.fold_output(mixed, weights.sum(-1, keepdim=True))


class _Scorer:
    """One tile of query rows `[rows, kv_heads, query rows, D]` against a layer's keys."""

    def __init__(self, keys: Stream, query: Tensor) -> None:
        self.keys, self.query = keys, query
        self.folded, self.constant = keys.plan.transform.fold_query(query)

    def packed(self, pages: Pages) -> Tensor:
        """Scores of the keys in `pages`: `[rows, kv_heads, query rows, tokens]`."""
        scores = self.keys.plan.codec.scores(self.folded, self.keys.pool.read(pages))
        return scores if self.constant is None else scores + self.constant

    def exact(self, keys: Tensor) -> Tensor:
        """Scores of `keys [rows, kv_heads, tokens, D]`."""
        return self.query @ keys.float().mT


def _either(hidden: Tensor | None, more: Tensor) -> Tensor:
    return more if hidden is None else hidden | more
