"""A row of one layer in float64, forward by forward; where float32 may choose otherwise it goes on as the cache did."""

import copy
from dataclasses import dataclass, field

import torch
from oracle import rotated
from placement.spec import Attending, Blocks, block_scores, mixed, replaced, token_scores
from torch import Tensor

# Scores closer than this may be ordered otherwise by float32: probabilities relative to the larger (exponentials of logits of
# order 10), scores of blocks relative to their products' size. Keys unrotated to before RoPE are rounded to the model's dtype.
PROBABILITY = 1e-4
LOGIT = {torch.float32: 4e-6, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass
class Tally:
    """Choices made, and those that fell within rounding and were the cache's, not the oracle's."""

    choices: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def compare(self, scores: Tensor, wanted: int, found: Tensor, noise: Tensor | float, where: str) -> None:
        """The `wanted` largest of `scores [n]` are `found` (indices), but for those within `noise` of the last of them."""
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
    """One row after a forward: fetched tokens, `positions [kv_heads, n]` (-1: none), `pairs [kv_heads, n, 2 D]`."""

    positions: Tensor
    pairs: Tensor

    def of(self, head: int) -> Tensor:
        """A head's positions of fetched tokens."""
        return self.positions[head][self.positions[head] >= 0].long()


def pairs_of(positions: Tensor) -> set[tuple[int, int]]:
    """Head and position of every one of `positions [kv_heads, n]` that is somewhere."""
    return {(head, position) for head, own in enumerate(positions.tolist()) for position in own if position >= 0}


@dataclass
class Row:
    """Every token of a row as it came, `keys`, `values [kv_heads, length, D]`, in the model's dtype; attention is exact.

    `fetched_positions [kv_heads, any]` (-1: none) are the positions whose pairs the device holds beside what it always does.
    """

    attending: Attending
    keys: Tensor
    values: Tensor
    fetched_positions: Tensor
    prompt: int = 0

    def again(self) -> "Row":
        """A copy that goes its own way."""
        return copy.copy(self)

    def fetched_pairs(self) -> set[tuple[int, int]]:
        """Head and position of every fetched token."""
        return pairs_of(self.fetched_positions)

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def take(self, keys: Tensor, values: Tensor) -> None:
        """The row grows."""
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        self.prompt = self.prompt or self.length

    def joined(
        self, keys: Tensor, values: Tensor, stored: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Everything that a forward meets, float64: what is `stored` (as it came, if not said) and what is new."""
        held = stored or (self.keys, self.values)
        return (
            torch.cat([held[0].double(), keys.double()], 1),
            torch.cat([held[1].double(), values.double()], 1),
        )

    def exact(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[heads, n, D]` and probabilities of attention to everything as it came."""
        met, mixture = self.joined(keys, values)
        probabilities = self.attending.probabilities(query.double(), met, self.length)
        return mixed(probabilities, mixture), probabilities


@dataclass
class SpeCacheRow(Row):
    """FetchedPool are met exactly, other tokens as the low-bit copy has them; `wanted` is k."""

    wanted: int = 0

    def speculative(
        self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor], packed: int
    ) -> tuple[Tensor, Tensor]:
        """Outputs of all columns, the last one a guess, and scores of the candidates, `[kv_heads, candidates]`.

        `low` is the low-bit copy `[kv_heads, length, D]` each, `packed` its encoded tokens once the real column is stored.
        """
        probabilities, values = self.mixture(query, keys, values, low)
        stop = self.length + keys.shape[1] - 1
        return mixed(probabilities, values), self.candidates(token_scores(probabilities), packed, stop)

    def select(self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor], packed: int) -> Tensor:
        """Scores of the candidates, `[kv_heads, candidates]`, from the low-bit copy alone; one column."""
        met, _ = self.joined(keys, values, low)
        probabilities = self.attending.probabilities(query.double(), met, self.length)
        return self.candidates(token_scores(probabilities), packed, self.length)

    def output(self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor]) -> Tensor:
        """Attention with the fetched tokens instead of their low-bit pairs."""
        return mixed(*self.mixture(query, keys, values, low))

    def mixture(self, query: Tensor, keys: Tensor, values: Tensor, low: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Probabilities, and the values that they mix."""
        fetched = torch.zeros(low[0].shape[:2], dtype=torch.bool)
        for head, positions in enumerate(self.fetched_positions):
            fetched[head, positions[positions >= 0].long()] = True
        stored = replaced(low[0], self.keys.double(), fetched), replaced(low[1], self.values.double(), fetched)
        met, mixture = self.joined(keys, values, stored)
        return self.attending.probabilities(query.double(), met, self.length), mixture

    def candidates(self, scores: Tensor, packed: int, stop: int) -> Tensor:
        """The scores of encoded tokens that a query at position `stop` sees; -1 of others, which are no candidates."""
        scores = scores[:, :packed].clone()
        if self.attending.sliding is not None:
            scores[:, : max(0, stop - self.attending.sliding + 1)] = -1
        return scores

    def settle(self, scores: Tensor, shown: Shown, tally: Tally, where: str) -> None:
        """Compares what the cache chose by these scores, and takes it over."""
        for head, own in enumerate(scores):
            count = min(self.wanted, int((own >= 0).sum()))
            last = own.topk(count).values[-1] if count else torch.tensor(0.0)
            tally.compare(own, count, shown.of(head), PROBABILITY * float(last) + 1e-30, f"{where}, head {head}")
        self.fetched_positions = shown.positions.clone()


@dataclass
class InfLLMRow(Row):
    """`mass [kv_heads, length]` is m; `representatives` of each block, `[kv_heads, r]`, and by how much they won.

    A forward is encoded in chunks of `chunk` tokens; None: at once. `copied` pairs were not there before, in the last forward;
    `furthest` is the longest distance from any query so far to a token that it met.
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
        """Outputs `[heads, n, D]`, chunk by chunk; the row grows by each before the next. `shown` are the cache's choices for them,
        which are compared and taken over."""
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
        """Outputs of one chunk; then the row grows by it."""
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
        """The tokens of a block with the greatest mass; doubtful where the next one's is as great but for rounding."""
        positions = self.blocks.of(number)
        mass, order = self.mass[:, positions].sort(descending=True, stable=True)
        self.representatives += (positions[order[:, : self.count]],)
        edge = mass[:, min(self.count, mass.shape[1] - 1)]
        narrow = (mass[:, self.count - 1] - edge) <= PROBABILITY * mass[:, self.count - 1]
        self.doubtful += (narrow & torch.tensor(self.count < self.blocks.block),)

    def chosen(self, query: Tensor, met: Tensor, held: int, shown: Shown, tally: Tally, where: str) -> Tensor:
        """Which tokens are attended, `[kv_heads, T]`: those of the blocks that the cache chose, if it may have."""
        numbers = torch.stack(self.representatives, 1).flatten(1)
        keys = torch.stack([own[positions] for own, positions in zip(met, numbers, strict=True)]).unflatten(
            1, (held, -1)
        )
        scores, sizes = block_scores(query, keys, self.attending.scale)
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
            # A block whose representatives are doubtful has no certain score.
            noise = torch.inf if doubts[head].any() else noise
            tally.compare(own, min(self.fetched, held), found, noise, spot)
            kept[head, start:stop] = False
            kept[head, positions] = True
        return kept

    def rounded(self, met: Tensor, shown: Shown) -> Tensor:
        """Fetched keys as the cache holds them before RoPE, rounded to the model's dtype, rotated to their positions."""
        if self.frequencies is None:
            return met
        met, position = met.clone(), self.blocks.first_local(self.length) - 1
        for head in range(len(met)):
            positions = shown.of(head)
            pairs = shown.pairs[head][shown.positions[head] >= 0].double()
            met[head, positions] = rotated(pairs[:, : met.shape[2]], self.frequencies, position)
        return met
