"""Float64 oracles of one row of one layer under offloading; they adopt the cache's choices where float32 may choose differently."""

import copy
from dataclasses import dataclass, field

import torch
from oracle import rotated
from placement.spec import Attending, Blocks, block_scores, mixed, replaced, token_scores
from torch import Tensor

# Scores closer than this may be ordered differently by float32: probabilities, relative to the larger one (exponentials of logits
# of order 10); scores of blocks, relative to the magnitude of their products (keys before RoPE are rounded to the model's dtype).
PROBABILITY = 1e-4
LOGIT = {torch.float32: 4e-6, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass
class Tally:
    """Counts of choices, and of those that differ from the oracle's within rounding (`ties`); `wrong` describes all others."""

    choices: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def compare(self, scores: Tensor, wanted: int, found: Tensor, noise: Tensor | float, where: str) -> None:
        """Compare indices `found` with the `wanted` largest of `scores [n]`, up to scores within `noise` of the least of these."""
        self.choices += 1
        chosen = found.tolist()
        if len(set(chosen)) != len(chosen) or len(chosen) != wanted:
            self.wrong.append(f"{where}: chose {sorted(chosen)}, {wanted} of {len(scores)} wanted")
            return
        if any(not 0 <= position < len(scores) for position in chosen):
            self.wrong.append(f"{where}: chose {sorted(chosen)} of {len(scores)} candidates")
            return
        best = scores.topk(wanted).indices.tolist()
        if odd := set(best) ^ set(chosen):
            last = scores[best].min()
            self.ties += 1
            if any(abs(scores[position] - last) > noise for position in odd):
                differing = {position: float(scores[position]) for position in sorted(odd)}
                self.wrong.append(f"{where}: the {wanted}. largest is {float(last):.6g}, differing {differing}")


@dataclass
class Shown:
    """The fetched tokens of one row after a forward: `positions [kv_heads, n]` (-1: none) and `pairs [kv_heads, n, 2 D]`."""

    positions: Tensor
    pairs: Tensor

    def of(self, head: int) -> Tensor:
        """The positions of a head's fetched tokens."""
        return self.positions[head][self.positions[head] >= 0].long()


def pairs_of(positions: Tensor) -> set[tuple[int, int]]:
    """(head, position) of every entry of `positions [kv_heads, n]` that is not -1."""
    return {(head, position) for head, own in enumerate(positions.tolist()) for position in own if position >= 0}


@dataclass
class Row:
    """All tokens of a row, exactly: `keys` and `values [kv_heads, length, D]` in the model's dtype; attention is exact.

    `fetched_positions [kv_heads, any]` (-1: none) are the positions of tokens that are fetched to the device.
    """

    attending: Attending
    keys: Tensor
    values: Tensor
    fetched_positions: Tensor
    prompt: int = 0

    def again(self) -> "Row":
        """An independent copy."""
        return copy.copy(self)

    def fetched_pairs(self) -> set[tuple[int, int]]:
        """(head, position) of every fetched token."""
        return pairs_of(self.fetched_positions)

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Append new tokens; the first ones are the prompt."""
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        self.prompt = self.prompt or self.length

    def joined(
        self, keys: Tensor, values: Tensor, stored: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a forward's attention, float64: the `stored` ones (by default the exact ones), then the new ones."""
        held = stored or (self.keys, self.values)
        return (
            torch.cat([held[0].double(), keys.double()], 1),
            torch.cat([held[1].double(), values.double()], 1),
        )

    def exact(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[heads, n, D]` and probabilities of attention over all exact tokens."""
        met, mixture = self.joined(keys, values)
        probabilities = self.attending.probabilities(query.double(), met, self.length)
        return mixed(probabilities, mixture), probabilities


@dataclass
class SpeCacheRow(Row):
    """SpeCache: attention uses fetched tokens exactly and the low-bit copy of all others; `wanted` is k."""

    wanted: int = 0

    def speculative(
        self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor], packed: int
    ) -> tuple[Tensor, Tensor]:
        """Outputs of all columns, of which the last is the speculative token, and scores of the candidates, `[kv_heads,
        candidates]`.

        `low` are keys and values of the low-bit copy, `[kv_heads, length, D]` each; `packed` is the number of its encoded tokens
        after the real columns are stored.
        """
        probabilities, values = self.mixture(query, keys, values, low)
        stop = self.length + keys.shape[1] - 1
        return mixed(probabilities, values), self.candidates(token_scores(probabilities), packed, stop)

    def select(self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor], packed: int) -> Tensor:
        """Scores of the candidates, `[kv_heads, candidates]`, from the low-bit copy alone, for a forward of one column."""
        met, _ = self.joined(keys, values, low)
        probabilities = self.attending.probabilities(query.double(), met, self.length)
        return self.candidates(token_scores(probabilities), packed, self.length)

    def output(self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output with the fetched tokens instead of their low-bit copies."""
        return mixed(*self.mixture(query, keys, values, low))

    def mixture(self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Attention probabilities, and the values that they weight, with fetched tokens exact."""
        fetched = torch.zeros(low[0].shape[:2], dtype=torch.bool)
        for head, positions in enumerate(self.fetched_positions):
            fetched[head, positions[positions >= 0].long()] = True
        stored = replaced(low[0], self.keys.double(), fetched), replaced(low[1], self.values.double(), fetched)
        met, mixture = self.joined(keys, values, stored)
        return self.attending.probabilities(query.double(), met, self.length), mixture

    def candidates(self, scores: Tensor, packed: int, stop: int) -> Tensor:
        """Scores of the first `packed` tokens; -1 (no candidate) outside the sliding window of a query at position `stop`."""
        scores = scores[:, :packed].clone()
        if self.attending.sliding is not None:
            scores[:, : max(0, stop - self.attending.sliding + 1)] = -1
        return scores

    def settle(self, scores: Tensor, shown: Shown, tally: Tally, where: str) -> None:
        """Compare the tokens that the cache fetched with the largest scores, and continue with the cache's choice."""
        for head, own in enumerate(scores):
            count = min(self.wanted, int((own >= 0).sum()))
            last = own.topk(count).values[-1] if count else torch.tensor(0.0)
            tally.compare(own, count, shown.of(head), PROBABILITY * float(last) + 1e-30, f"{where}, head {head}")
        self.fetched_positions = shown.positions.clone()


@dataclass
class InfLLMRow(Row):
    """InfLLM. `mass [kv_heads, length]` is the paper's m; `representatives` are the positions `[kv_heads, count]` of each block,
    and `doubtful` says for each block whether float32 may choose others.

    A forward is processed in chunks of `chunk` tokens (None: at once). `copied` counts the pairs that were newly fetched in the
    last forward; `furthest` is the longest distance so far from a query to a token that it attended to.
    """

    blocks: Blocks = field(default_factory=lambda: Blocks(0, 0, 1))
    count: int = 1
    fetched: int = 1
    chunk: int | None = None
    frequencies: Tensor | None = None
    mass: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    representatives: tuple[Tensor, ...] = ()
    doubtful: tuple[Tensor, ...] = ()
    copied: int = 0
    furthest: int = 0

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, shown: list[Shown], tally: Tally, where: str
    ) -> Tensor:
        """Outputs `[heads, n, D]`; each chunk is appended to the row before the next. `shown` are the cache's choices for the
        chunks, which are compared and adopted."""
        size, outputs, self.copied = self.chunk or query.shape[1], [], 0
        parts = [part.split(size, 1) for part in (query, keys, values)]
        if len(shown) != len(parts[0]):
            tally.wrong.append(f"{where}: attended {len(shown)} times, {len(parts[0])} chunks")
            shown = [*shown, *shown[-1:] * len(parts[0])]
        for number, given in enumerate(zip(*parts, strict=True)):
            before = self.fetched_pairs()
            spot = where if len(shown) == 1 else f"{where}, chunk {number}"
            outputs.append(self.encoded(*given, shown[number], tally, spot))
            self.copied += len(self.fetched_pairs() - before)
        return torch.cat(outputs, 1)

    def encoded(self, query: Tensor, keys: Tensor, values: Tensor, shown: Shown, tally: Tally, where: str) -> Tensor:
        """Return the outputs of one chunk and append it to the row."""
        held, met, mixture = self.blocks.count(self.length), *self.joined(keys, values)
        kept = None
        self.furthest = max(self.furthest, self.blocks.furthest(self.length, keys.shape[1]))
        if held:
            met = self.blocks.met(met, self.length, self.frequencies)
            kept = self.chosen(query.double(), met, held, shown, tally, where)
            met = self.rounded(met, shown)
        probabilities = self.attending.probabilities(query.double(), met, self.length, kept)
        before, self.mass = self.mass, self.blocks.mass(probabilities, self.length)
        if self.length:
            self.mass[:, : self.length] += before
        self.take(keys, values)
        self.fetched_positions = shown.positions if held else self.fetched_positions
        for number in range(held, self.blocks.count(self.length)):
            self.represent(number)
        return mixed(probabilities, mixture)

    def represent(self, number: int) -> None:
        """Add the representatives of a block, its tokens of greatest mass; doubtful if the next one's is equal up to rounding."""
        positions = self.blocks.of(number)
        mass, order = self.mass[:, positions].sort(descending=True, stable=True)
        self.representatives += (positions[order[:, : self.count]],)
        edge = mass[:, min(self.count, mass.shape[1] - 1)]
        narrow = (mass[:, self.count - 1] - edge) <= PROBABILITY * mass[:, self.count - 1]
        self.doubtful += (narrow & torch.tensor(self.count < self.blocks.block),)

    def chosen(self, query: Tensor, met: Tensor, held: int, shown: Shown, tally: Tally, where: str) -> Tensor:
        """The mask of attended tokens, bool `[kv_heads, T]`, by the cache's choice of blocks, which is compared with scores."""
        numbers = torch.stack(self.representatives, 1).flatten(1)
        keys = torch.stack([own[positions] for own, positions in zip(met, numbers, strict=True)]).unflatten(
            1, (held, -1)
        )
        scores, sizes = block_scores(query, keys, self.attending.scale)
        if self.attending.sliding is not None:  # candidates: blocks of which the first query sees the last token
            last = torch.tensor([int(self.blocks.of(number)[-1]) for number in range(held)])
            scores = scores.masked_fill(last <= self.length - self.attending.sliding, -torch.inf)
        doubts = torch.stack(self.doubtful, 1)
        kept = torch.ones(met.shape[:2], dtype=torch.bool)
        start, stop = self.blocks.initial, self.blocks.first_local(self.length)
        for head, own in enumerate(scores):
            positions = shown.of(head)
            found = ((positions - start) // self.blocks.block).unique()
            spot = f"{where}, head {head}"
            whole = torch.cat([self.blocks.of(int(number)) for number in found]) if len(found) else positions
            if not torch.equal(positions.sort().values, whole):
                tally.wrong.append(f"{spot}: {positions.sort().values.tolist()} are no whole blocks")
            noise = LOGIT[self.keys.dtype] * float(sizes[head].max())
            # With doubtful representatives, scores are not certain, and any choice is accepted.
            noise = torch.inf if doubts[head].any() else noise
            tally.compare(own, min(self.fetched, int(own.isfinite().sum())), found, noise, spot)
            kept[head, start:stop] = False
            kept[head, positions] = True
        return kept

    def rounded(self, met: Tensor, shown: Shown) -> Tensor:
        """`met` with the cache's own fetched keys, which are rounded before RoPE, rotated to the position of blocks."""
        if self.frequencies is None:
            return met
        met, position = met.clone(), self.blocks.first_local(self.length) - 1
        for head in range(len(met)):
            positions = shown.of(head)
            pairs = shown.pairs[head][shown.positions[head] >= 0].double()
            met[head, positions] = rotated(pairs[:, : met.shape[2]], self.frequencies, position)
        return met
