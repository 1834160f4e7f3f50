"""Checks the tokens that a cache stores against all keys and values it was given, which a DynamicCache keeps exactly.

The shadow starts from the stored tokens, so it cannot detect that a row stores another row's tokens, or a draft that was rejected.
The mirror can: every stored token of a row must equal the given one, encoded by the method's own stages alone and in one piece. So
batch, padding, chunks and drafts must not change what is stored. In tiers, whose tokens depend on attention, every stored token
must be one of the given tokens, only once, as its tier encodes it.
"""

from functools import partial
from typing import Any

import oracle
import torch
from tolerances import STORED, TIED
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from calib.runtime.cache import CompressedCache
from calib.runtime.offload.store import OffloadStore
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec import Exact
from calib.runtime.stages.tiering import HeavyHitterBudget
from calib.runtime.tiered.store import TieredStore


class Mirror:
    """Records everything that a compressed cache is given from its first token on: `update`, `reorder_cache` and `crop`."""

    def __init__(self, cache: CompressedCache) -> None:
        self.cache, self.exact = cache, DynamicCache()
        self.exact.layers = [DynamicLayer() for _ in cache.compressed]
        for layer, own in zip(cache.compressed, self.exact.layers, strict=True):
            listen(layer, "update", partial(take_in, layer, own))
        listen(cache, "reorder_cache", self.exact.reorder_cache)
        listen(cache, "crop", self.exact.crop)

    def check(self, mask: Tensor | None) -> None:
        """Assert that the cache stores the recorded tokens alone; `mask [rows, columns]` is its last forward's padding mask."""
        lengths = self.cache.sequences.lengths
        for number, (layer, given) in enumerate(zip(self.cache.compressed, self.exact.layers, strict=True)):
            real = torch.ones(given.keys.shape[0], given.keys.shape[2]) if mask is None else mask
            real = real[:, : given.keys.shape[2]].bool()
            assert real.sum(1).tolist() == lengths, f"rows of {lengths} tokens, given {real.sum(1).tolist()}"
            for row in range(len(lengths)):
                tokens = [part[row : row + 1, :, real[row]] for part in (given.keys, given.values)]
                odd = odd_in(layer.store, row, *tokens)
                assert not odd, f"layer {number}, row {row}: {odd}"


def take_in(layer: Any, own: DynamicLayer, keys: Tensor, values: Tensor, *rest: Any) -> None:
    """Record the keys and values given to a layer, without a speculative token, which must not be stored."""
    sequences = layer.sequences
    begun = sequences.steps == layer.steps + 1  # by a layer before this one
    columns = slice(keys.shape[2] - (sequences.forward.speculative if begun else sequences.speculating))
    own.update(keys[:, :, columns], values[:, :, columns])


def odd_in(store: Any, row: int, keys: Tensor, values: Tensor) -> str:
    """A text with the differences of a row's stored tokens from the given ones, `[1, kv_heads, T, head_dim]`; empty if none."""
    if isinstance(store, OffloadStore):
        found = {part: odd_in(getattr(store, part), row, keys, values) for part in ("low", "host")}
        found["fetched"] = odd_fetched(store, row, keys, values)
        return "; ".join(f"{part}: {odd}" for part, odd in found.items() if odd)
    return (odd_in_tiers if isinstance(store, TieredStore) else odd_in_order)(store, row, keys, values)


def odd_fetched(store: Any, row: int, keys: Tensor, values: Tensor) -> str:
    """The fetched pairs of a row that differ from the given ones at their positions; only values are compared if keys are stored
    before RoPE. Tokens outside a sliding window are not compared.
    """
    given, found, sliding = torch.cat([keys, values], 3)[0], store.pool, store.host.sequences.sliding
    seen = -1 if sliding is None else keys.shape[2] - sliding
    first = keys.shape[3] if getattr(store.low, "relocates", False) else 0
    odd = []
    for head, positions in enumerate(found.positions[row]):
        there = (positions >= 0) & (positions > seen)
        own = positions[there].long()
        if len(own.unique()) < len(own) or bool((own >= keys.shape[2]).any()):
            return f"positions {own.tolist()} of {keys.shape[2]} tokens"
        same = (found.pairs[row, head, there] == given[head, own])[:, first:].all(1)
        odd += [(head, int(position)) for position in own[~same]]
    return f"at (head, position) {odd} lies another pair" if odd else ""


def odd_in_order(store: Any, row: int, keys: Tensor, values: Tensor) -> str:
    """The tokens of a row in an ordered store that differ from the given ones, `[1, kv_heads, T, head_dim]`, after encoding."""
    (length, sliding), found = (keys.shape[2], store.sequences.sliding), oracle.held_by(store, row)
    kept = slice(0 if sliding is None else max(0, length - sliding + 1), None)
    for stream, held, tokens in zip(store.streams, found[:2], (keys, values), strict=True):
        expected = stored(stream, tokens)[0]
        off = (held - expected)[:, kept].abs().amax((0, 2))
        odd = (~(off <= STORED * expected.abs().max())).nonzero()[:, 0].tolist()  # `~`: NaN is odd
        if odd:
            return f"{stream.role}: the tokens {odd} are not those given"
    return ""


def stored(stream: Any, tokens: Tensor) -> Tensor:
    """The tokens `[1, kv_heads, T, head_dim]` as a stream should store them, float64; those in pages are encoded and decoded."""
    codec, transform = stream.plan.codec, stream.plan.transform
    packed = stream.plan.schedule.packed(tokens.shape[2])
    block = codec.encode(transform.forward(tokens[:, :, :packed]), stream.fp32_params)
    decoded = transform.inverse(codec.decode(block, tokens.shape[3]))
    return torch.cat([decoded.double(), tokens[:, :, packed:].double()], 2)


def odd_in_tiers(store: Any, row: int, keys: Tensor, values: Tensor) -> str:
    """The stored tokens of a row in tiers that are none of the given ones, `[1, kv_heads, T, head_dim]`, after their tier's
    encoding, or that are stored twice.

    The right tier of a token depends on attention, which test_importance tests. Here each stored token is identified among the
    given ones, by its position if the tier stores it, else as the nearest one.
    """
    held, at = oracle.held_by(store, row), 0
    if store.plan.kinds < len(store.tiers):
        return odd_in_segments(store, row, held, keys, values)
    whose, given = [], []
    for number, count in enumerate([*store.counts(row), store.sequences.exact(row, keys.shape[2])]):
        part, is_window = slice(at, at + count), number == len(store.tiers)
        at += count
        found = torch.cat([held.keys, held.values], 2)[:, part]
        choices = [given_to(store, row, path, keys, values) for path in paths(store, number)]
        if is_window:
            owner = oracle.in_window(store, row, keys.shape[2]).expand(found.shape[:2])
        else:
            owner = likest(found, choices[0]) if held.positions is None else held.positions[:, part]
        index = owner[..., None].expand(found.shape)
        off = torch.stack([(found - choice.gather(1, index)).abs().amax(2) for choice in choices]).amin(0)
        is_exact = is_window or isinstance(store.tiers[number].plan.keys.codec, Exact)
        most = 0.0 if is_exact else TIED if store.plan.before_rope else STORED
        odd = (~(off <= most * float(choices[0].abs().max()))).nonzero().tolist()
        if odd:
            return f"{'the window' if is_window else f'tier {number}'}: at (head, slot) {odd} lies no token given"
        whose.append(owner)
        given.append(choices[0])
    return "a token is held twice" if any(map(repeated, torch.cat(whose, 1), zip(*given, strict=True))) else ""


def odd_in_segments(store: Any, row: int, held: oracle.Held, keys: Tensor, values: Tensor) -> str:
    """The stored tokens of a row in segments that differ from the given ones: for each chunk the tokens of a tier are encoded
    together again. They are identified by position or as the nearest ones; the last tier has the tokens that no other tier has."""
    tiering, prompt, length = store.plan.tiering, store.sequences.prompt(row), keys.shape[2]
    found, given = torch.cat([held.keys, held.values], 2), torch.cat([keys, values], 3)[0].double()
    ends = store.counts(row)
    used = [
        sum(ends[:number]) for number in range(len(ends))
    ]  # the first slot of each tier that has not been checked yet
    start = 0
    while start < tiering.encoded(length, prompt):
        chunk, owners = tiering.chunk_of(start, prompt), []
        for number, count in enumerate(tiering.counts(len(chunk)), tiering.separate_prompt_tiers if start else 0):
            part = slice(used[number], used[number] + count)
            used[number] += count
            if number % store.plan.kinds == store.plan.kinds - 1:  # those in no other tier: few bits identify no token
                others = torch.cat([torch.zeros(store.heads, 0, dtype=torch.int64), *owners], 1) - chunk.start
                mine = torch.ones(store.heads, len(chunk), dtype=torch.bool).scatter_(1, others, False)
                if mine.sum() != mine.shape[0] * count:
                    return f"the chunk at {chunk.start} holds a token twice"
                owner = mine.nonzero()[:, 1].view(-1, count) + chunk.start
            elif held.positions is None:
                distance = torch.cdist(found[:, part], given[:, chunk.start : chunk.stop])
                owner = torch.stack([rising(own) for own in distance]) + chunk.start
            else:
                owner = held.positions[:, part]
            if count:
                odd = odd_slots(store, row, number, found[:, part], owner, keys, values)
                if len(odd) and held.positions is None:
                    owner, odd = told_apart(store, row, number, found[:, part], owner, chunk, keys, values)
                if len(odd):
                    return f"tier {number}: at (head, slot of the chunk at {start}) {odd.tolist()} is none of the tokens given"
            owners.append(owner)
        start = chunk.stop
    exact = length - start
    window = given[:, length - exact :]
    return "" if torch.equal(found[:, found.shape[1] - exact :], window) else "the window holds others than those given"


def distances(
    store: Any, row: int, number: int, found: Tensor, owner: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, float]:
    """The distances `[kv_heads, n]` of a tier's tokens `found [kv_heads, n, D]` from the given tokens at `owner [kv_heads, n]`,
    encoded together by the tier and decoded; and the allowed distance."""
    # Some shared parameters are measured over the whole chunk from which the tokens were chosen.
    chunk, tier = store.plan.tiering.chunk_of(int(owner.min()), store.sequences.prompt(row)), store.tiers[number]
    of_chunk = (x[:, :, chunk.start : chunk.stop] for x in (keys, values))
    block = tier.encode([row], *of_chunk, owner[None], owner[None] - chunk.start)
    expected = torch.cat(tier.decode([row], block), 3)[0].double()
    return (found - expected).abs().amax(2), STORED * float(expected.abs().max())


def odd_slots(store: Any, row: int, number: int, found: Tensor, owner: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(head, slot) of the tokens whose distance is too large."""
    off, most = distances(store, row, number, found, owner, keys, values)
    return (~(off <= most)).nonzero()


def told_apart(
    store: Any, row: int, number: int, found: Tensor, owner: Tensor, chunk: range, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Correct a wrong identification: at each head's slot with the largest distance, `owner` gets another token between its
    neighbours, if one fits. Returns the new `owner` and the slots that are still too far.

    If a word occurs twice, its keys differ little but for the rotation, and a stored token may be as near to either.
    """
    off, most = distances(store, row, number, found, owner, keys, values)
    for head in (~(off.amax(1) <= most)).nonzero()[:, 0].tolist():
        slot, ends = int(off[head].argmax()), [chunk.start - 1, *owner[head].tolist(), chunk.stop]
        for other in range(ends[slot] + 1, ends[slot + 2]):
            tried = owner.clone()
            tried[head, slot] = other
            if float(distances(store, row, number, found, tried, keys, values)[0][head].max()) <= most:
                owner = tried
                break
    return owner, odd_slots(store, row, number, found, owner, keys, values)


def rising(distance: Tensor) -> Tensor:
    """The tokens with the smallest total distance for the slots of `distance [n, T]`, int64 `[n]`, in strictly rising order: slots
    hold the tokens of a chunk in order, which helps to identify similar tokens."""
    best, choices = distance.new_zeros(distance.shape[1] + 1), []
    for own in distance:
        best, choice = torch.cummin(best[:-1] + own, 0)
        best = torch.cat([best.new_full((1,), torch.inf), best])
        choices.append(choice)
    chosen, last = [], distance.shape[1] - 1
    for choice in reversed(choices):
        chosen.append(int(choice[last]))
        last = chosen[-1] - 1
    return torch.tensor(chosen[::-1], dtype=torch.int64)


def repeated(owners: Tensor, given: tuple[Tensor, ...]) -> bool:
    """Whether a token is stored more often than it was given. `owners [n]` are the tokens' numbers, `given` the tokens `[T, D]` as
    each tier encodes them.

    Tokens that some tier encodes alike (padding at the end of a row, similar ones at few bits) are counted together.
    """
    if len(owners.unique()) == len(owners):
        return False
    label, before = torch.arange(len(given[0])), None
    groups = [tier.unique(dim=0, return_inverse=True)[1] for tier in given]
    while before is None or not torch.equal(label, before):  # until groups that share a token are joined
        before = label
        for group in groups:
            label = label.scatter_reduce(0, group, label, "amin", include_self=False)[group]
    counts = [numbers.bincount(minlength=len(label)) for numbers in (label[owners], label)]
    return bool((counts[0] > counts[1]).any())


def paths(store: TieredStore, number: int) -> list[tuple[int, ...]]:
    """The sequences of tiers through which a token may have come to tier `number`; an empty one for the window."""
    if number == len(store.tiers):
        return [()]
    return [(number,), (0, number)] if number and isinstance(store.plan.tiering, HeavyHitterBudget) else [(number,)]


def given_to(store: TieredStore, row: int, path: tuple[int, ...], keys: Tensor, values: Tensor) -> Tensor:
    """The given tokens, encoded and decoded by each tier of `path`: keys and values, float64 `[kv_heads, T, 2 head_dim]`."""
    cos_sin = None
    if store.plan.before_rope and path:
        cos_sin = store.context.rotation.along(0, keys.shape[2], keys.device)
        keys = Rotation.rotated(keys.float(), cos_sin[0], -cos_sin[1])
    whole = whole_groups(store, keys.shape[2])
    for number in path:
        tier, own = store.tiers[number], [keys[:, :, whole], values[:, :, whole]]
        positions = torch.arange(own[0].shape[2]).expand(keys.shape[0], keys.shape[1], -1)
        decoded = tier.decode([row], tier.encode([row], *own, positions))
        # Tokens outside whole groups are in no tier: they stay as given, and are not compared.
        keys, values = (
            torch.cat([x[:, :, : whole.start], y, x[:, :, whole.stop :]], 2)
            for x, y in zip((keys, values), decoded, strict=True)
        )
    if cos_sin is not None:
        keys = Rotation.rotated(keys, *cos_sin)
    return torch.cat([keys, values], 3)[0].double()


def whole_groups(store: TieredStore, length: int) -> slice:
    """The tokens of a row of `length` that tiers may hold: all, or if tiers take groups of tokens, whole groups after sinks."""
    first, group = store.plan.tiering.slots_from, store.plan.tiering.multiple
    if first is None or group == 1:
        return slice(0, length)
    return slice(first, first + max(0, length - first) // group * group)


def likest(found: Tensor, choice: Tensor) -> Tensor:
    """The index of the token of `choice [kv_heads, T, D]` nearest to each of `found [kv_heads, n, D]`: int64 `[kv_heads, n]`.

    Distances are those of eight random projections, in which equal tokens are nearest too.
    """
    projection = torch.randn(found.shape[2], 8, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    return torch.cdist(found @ projection, choice @ projection, p=1).argmin(2)


def listen(told: Any, name: str, also: Any) -> None:
    """Replace the method `name` of `told` by one that first calls `also` with the same arguments."""
    original = getattr(told, name)

    def both(*arguments: Any, **options: Any) -> Any:
        also(*arguments, **options)
        return original(*arguments, **options)

    setattr(told, name, both)
