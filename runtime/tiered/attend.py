"""Attention over several tiers, the exact window and the tokens just arrived: one running softmax over all of them.

What saliency needs comes out of the same pass: the probabilities of chosen parts (an important tier's slots, the window,
the new tokens), summed over the query rows of a KV head. `Seen` holds those sums, O(T).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.attend.operation import Attended
from calib.kernels.attend.reference import RunningSoftmax
from calib.runtime.beside import newest
from calib.runtime.pages import TIER_PAGE_TOKENS
from calib.runtime.stages.saliency.probes import share_of
from calib.runtime.tiered.parts import Part, Parts
from calib.runtime.tiered.reading import Asked, TieredReading

# Query rows of a KV head that are scored at once: bounds the scores of a long chunk against a tile.
QUERY_ROWS = 1024

# Logits of all heads and tokens together, where what a record adds to them is worked out for all tiles at once.
LISTED_LOGITS = 2**24


@dataclass
class Seen:
    """Attention mass by KV head, float32: on slots of the watched tier or the window `held [rows, kv_heads, slots]`, and
    on the new tokens `new [rows, kv_heads, n]`."""

    held: Tensor
    new: Tensor


@dataclass(frozen=True)
class Watch:
    """What is looked at: the slots of the first tier, or of the window; with `weights [rows, n, window + n]`, or all rows alike."""

    tier: bool
    weights: Tensor | None = None


@dataclass
class TieredAttention:
    """What a layer `held` before a forward, as its queries read it; each sees the share `kept` of its tokens alone, or all."""

    held: Parts
    kept: float | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether these rows hold nothing yet and plain causal attention does."""
        rows, forward, logits = self.held.rows, self.held.forward, self.held.logits
        width = forward.counts[rows.start]
        plain = logits.softcap is None and (logits.sliding is None or width <= logits.sliding)
        return plain and width > 1 and not any(forward.before[row] for row in rows)

    def prompt(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Exact causal attention of rows that hold nothing yet."""
        return F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=self.held.logits.scale, enable_gqa=True
        )

    def output(
        self, query: Tensor, new_keys: Tensor, new_values: Tensor, watch: Watch | None = None
    ) -> tuple[Tensor, Seen | None]:
        """Attention of queries none of whose columns is padding.

        `query [rows, heads, n, D]`, new tokens `[rows, kv_heads, n, D]` -> `[rows, heads, n, D]` in the query's dtype, and
        what was seen of what `watch` asks for.
        """
        held, length, kv_heads = self.held, query.shape[2], new_keys.shape[1]
        step = min(max(1, QUERY_ROWS * kv_heads // query.shape[1]), self._listed_step(query.shape[1]))
        outputs, seen = [], None if watch is None else self._nothing_seen(watch, new_keys)
        for at in range(0, length, step):
            tile = query[:, :, at : at + step] if length > step else query
            queries = range(at, at + tile.shape[2])
            tile_tokens, sliding = held.tiers[0].tile_tokens, held.logits.sliding
            asked = Asked(held.rows, queries, sliding, tile_tokens, held.window_slots(), query.device)
            reading = TieredReading.of(held.state, held.forward, asked)
            # Query rows of a KV head: group-major, then the tokens of the tile.
            grouped = (tile.float() * held.logits.scale).unflatten(1, (kv_heads, -1)).flatten(2, 3)
            softmax, watched, asked_about = RunningSoftmax(), [], []
            left: dict[Callable[[Tensor], Tensor], list[Tensor]] = {}
            parts = held.met_by(
                grouped, reading, new_keys, new_values, watch is not None, watch is not None and watch.tier
            )
            for part in parts if self.kept is None else self._heaviest(list(parts), queries):
                if isinstance(part.mix, Attended):
                    softmax.join(part.mix.top, part.mix.mass, part.mix.mixed)
                elif part.is_last and part.is_plain:
                    softmax.add(part.mix(softmax.last_weights(part.scores)))
                else:
                    softmax.add(part.mix(softmax.weights(part.scores)))
                if part.watched:
                    watched.append(part.scores)
                if part.places is not None:
                    asked_about.append(part)
                if part.left is not None:
                    left.setdefault(part.left, []).append(part.scores)
            mixed = softmax.output()
            for added, scores in left.items():
                mixed = mixed + added(softmax.probabilities(torch.cat(scores, -1)))
            if held.beside is not None and asked_about:
                normaliser = newest(softmax.normaliser(), query.shape[1] // kv_heads)
                for part in asked_about:
                    assert part.places is not None
                    held.beside.add(part.places, part.scores, normaliser)
            if watch is not None and seen is not None:
                self._look(watch, seen, watched, softmax, reading, queries)
            outputs.append(mixed.unflatten(2, (-1, len(queries))).flatten(1, 2).to(query.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), seen

    @torch.no_grad()
    def _look(
        self,
        watch: Watch,
        seen: Seen,
        watched: list[Tensor],
        softmax: RunningSoftmax,
        reading: TieredReading,
        queries: range,
    ) -> None:
        """Adds a tile's probabilities: its logits are still there, and the log-sum-exp of its rows is known now."""
        parts = [softmax.probabilities(scores) for scores in watched]
        if watch.weights is not None:
            window, new = watch.weights[..., : reading.window], watch.weights[..., reading.window :][..., reading.new]
            weights = torch.cat([window, new], -1)[:, None, None, queries.start : queries.stop]
            parts = [(part.unflatten(2, (-1, len(queries))) * weights).flatten(2, 3) for part in parts]
        sums = torch.cat([part.sum(2) for part in parts], -1)
        fresh = reading.new.stop - reading.new.start
        seen.held += sums[..., : sums.shape[-1] - fresh]
        seen.new[..., reading.new] += sums[..., sums.shape[-1] - fresh :]

    def _listed_step(self, heads: int) -> int:
        """Query columns whose biases by the rows' records stay small."""
        held = self.held
        if not any(tier.records is not None for tier in held.tiers):
            return QUERY_ROWS
        longest = max(sum(held.state.held(row, held.forward.before[row])) for row in held.rows)
        return max(1, LISTED_LOGITS // max(1, len(held.rows) * heads * longest))

    def _nothing_seen(self, watch: Watch, new_keys: Tensor) -> Seen:
        state, before = self.held.state, self.held.forward.before
        if watch.tier:
            pages = (-(-state.held(row, before[row])[0] // TIER_PAGE_TOKENS) for row in self.held.rows)
            slots = max(pages) * TIER_PAGE_TOKENS
        else:
            slots = self.held.window_slots()
        held = torch.zeros(*new_keys.shape[:2], slots, device=new_keys.device)
        return Seen(held, torch.zeros(new_keys.shape[:3], device=new_keys.device))

    def _heaviest(self, parts: list[Part], queries: range) -> list[Part]:
        """Oracle eviction: each query row keeps the logits of its heaviest tokens alone, earlier ones where they tie."""
        assert self.kept is not None
        scores = torch.cat([part.scores for part in parts], -1)
        held = [self.held.forward.before[row] for row in self.held.rows]
        # A row that holds nothing yet reads its prompt, which is exact whatever the method.
        reach = self.held.logits.sliding or max(self.held.forward.after)
        counts = [[share_of(self.kept if n else 1, min(n + column + 1, reach)) for column in queries] for n in held]
        most = torch.tensor(counts, device=scores.device).repeat(1, scores.shape[2] // len(queries))[:, None, :, None]
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        found = scores.masked_fill(rank >= most, -torch.inf).split([part.scores.shape[-1] for part in parts], -1)
        return [replace(part, scores=own) for own, part in zip(found, parts, strict=True)]
