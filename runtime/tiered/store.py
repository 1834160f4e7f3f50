"""A store whose tokens lie in tiers: what all tierings share. Which token goes where is said by `chunks`, `budget`, `sinks`."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from calib.kernels.magnitude import largest_magnitude
from calib.kernels.probe_saliency.operation import attention_mass
from calib.kernels.to_half import HALF_MAX
from calib.runtime.attend.attend import attend, attend_observed
from calib.runtime.attend.attention_stats import AttentionStats, Observed
from calib.runtime.attend.prompt_attention import is_prompt, prompt, prompt_normalised
from calib.runtime.attend.request import AttendRequest
from calib.runtime.device.extremes import Extremes
from calib.runtime.files.state import State
from calib.runtime.held_tier import HeldTier
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.pool import PagePool
from calib.runtime.paging.window import Window
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.corrected import counts_of
from calib.runtime.stages.parameter_width import may_need_fp32
from calib.runtime.stages.seeded_rng import SeededRng
from calib.runtime.stages.selection import Saliency
from calib.runtime.store import Footprint, LayerContext
from calib.runtime.tiered import stored
from calib.runtime.tiered.forward_stats import ForwardStats
from calib.runtime.tiered.row_dictionary import RowDictionary
from calib.runtime.tiered.row_transform import RowTransform
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.spans import TieredTokens
from calib.runtime.tiered.tier import Tier


class TieredStore(ABC):
    """Tiers of one layer, and what a forward has shown of its tokens until it is stored.

    `plan` is a `TieredPlan`.
    """

    windows: tuple[Window, Window] | None = None
    # Tensors of the tiering's own, a row of the batch in each of their rows.
    of_rows: tuple[str, ...] = ()

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        """`keys`, `values [rows, kv_heads, n, head_dim]`: the first ones, which fix shapes and dtypes."""
        self.plan, self.sequences, self.context = plan, sequences, context
        self.rng = SeededRng(context.seed, context.layer)
        self.saliency: Saliency | None = plan.saliency
        self.heads, self.widths, self.itemsize = keys.shape[1], (keys.shape[3], values.shape[3]), keys.element_size()
        self.transforms: dict[Any, RowTransform] = {}
        # By stream, until parameters are as wide as its first tokens ask for.
        self.extremes: dict[str, Extremes] = {}
        for role, like in (("keys", keys), ("values", values)):
            asks, by_channel = False, False
            for number, tier in enumerate(plan.tiers):
                stages = dict(tier.streams())[role]
                key = self._key(role, number)
                transform = self.transforms.get(key) or RowTransform(stages.transform, like, torch.float16)
                self.transforms[key] = transform
                asks |= transform.measured is not None and like.dtype != torch.float16
                asks |= may_need_fp32(stages.codec, like.dtype)
                by_channel |= transform.measured is not None and not isinstance(key[1], int)
            if asks and like.shape[2]:
                self.extremes[role] = Extremes(like, by_channel)
        self.dictionaries = RowDictionary.of_streams(plan.tiers[0], keys, values, context)
        stores_positions = sequences.sliding is not None or plan.positions or self.needs_positions
        self.tiers = [
            Tier(
                tier,
                {role: self._transform(role, number) for role in ("keys", "values")},
                keys,
                values,
                stores_positions,
                self.dictionaries,
                sequences.first,
            )
            for number, tier in enumerate(plan.tiers)
        ]
        # Every pool with the number of its table.
        self._pools: list[tuple[int, PagePool]] = [(number, tier.pool) for number, tier in enumerate(self.tiers)]
        self._pools += [(-1, tier.row_params) for tier in self.tiers if tier.row_params is not None]
        self.query_values = 0
        self.shown = ForwardStats()

    @property
    def needs_positions(self) -> bool:
        """Whether every token's position in its row is kept."""
        return False

    @property
    def observes(self) -> bool:
        """Whether saliency decides; where not, storing needs neither queries nor probabilities."""
        return self.saliency is not None

    @abstractmethod
    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """The query rows of a prompt that are observed: int64 on the host, rising."""

    @abstractmethod
    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """What is observed in a forward of rows that hold tokens already."""

    @abstractmethod
    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Takes a forward's tokens in; what was seen of it is in `self.shown`."""

    def settle(self) -> None:
        """Fixes the width of parameters by the first tokens; before anything is measured or written."""
        extremes = {role: own.read() for role, own in self.extremes.items()}
        self.shown.extremes, self.extremes = self.extremes, {}
        for tier in self.tiers:
            tier.settle(extremes)
        for (role, _), transform in self.transforms.items():
            if role in extremes and bool(largest_magnitude(extremes[role]) > HALF_MAX):
                transform.widen()

    def graph_key(self, forward: Forward) -> Hashable | None:
        """See `Store.graph_key`. None unless the tiering knows better."""
        return None

    def encodes(self, forward: Forward) -> bool:
        """See `Store.encodes`."""
        return False

    def branch(self, forward: Forward) -> Hashable:
        """See `Store.branch`."""
        return None

    def shapes(self, forward: Forward) -> Hashable | None:
        """What every tiering's steps share in a block. What oracle eviction keeps is another number each time."""
        if self.plan.oracle_share is not None or any(forward.copies):
            return None
        # Pools have as many pages once they are prepared.
        capacities = tuple(self.sequences.tables[number].capacity for number, _ in self._pools)
        return self.sequences.graph_key(forward), capacities

    def _key(self, role: str, number: int) -> tuple[str, Any]:
        """What is measured over a whole chunk is measured once for all tiers; a tier of blocks takes its first chunk's, where its
        transform is of the same kind."""
        first = number % self.plan.kinds
        stage, of_first = (dict(self.plan.tiers[one].streams())[role].transform for one in (number, first))
        if getattr(stage, "over", "tier") == "chunk":
            return role, stage
        return role, first if type(stage) is type(of_first) else number

    def _transform(self, role: str, number: int) -> RowTransform:
        return self.transforms[self._key(role, number)]

    def prepare(self, forward: Forward) -> None:
        """Pages of every tier."""
        for number, pool in self._pools:
            pool.grow(self.sequences.tables[number].capacity)
            if forward.copies[number]:
                pool.copy(forward.copies[number])

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention over tiers, window and new tokens; with `observe` their mass is kept for `store`, or added at once where
        `watch` says so."""
        rows, given = request.rows, request.given
        observe = request.observe and self.observes
        self.query_values = given.query.shape[1] * given.query.shape[3]
        if observe:
            self.shown.queries[rows] = given.query.detach()
        if is_prompt(request):
            if not observe:
                return prompt(request)
            # Before its saliency, parts of which the host works out: meanwhile the device has something to do.
            output, normalisers = prompt_normalised(request)
            self.shown.seen[rows] = self._seen_of_prompt(request._replace(normalisers=normalisers))
            return output
        held = TieredTokens(
            self.sequences, request, self.tiers, self.windows, self.context.rotation, self.plan.before_rope, self.plan.oracle_share
        )  # fmt: skip
        observed = self.watch(request.forward, rows, given.query.device) if observe else None
        if observed is None:
            return attend(held)
        output, seen = attend_observed(held, observed)
        if seen is not None:
            self.shown.seen[rows] = seen
        return output

    @torch.no_grad()
    def _seen_of_prompt(self, request: AttendRequest) -> AttentionStats:
        keys, found = request.given.keys, []
        for i, row in enumerate(request.rows):
            probes = self.prompt_probes(row, keys.shape[2], self._ids(request.forward, row))
            self.shown.probes[row] = probes
            unseen = not len(probes)
            found.append(
                torch.zeros(keys.shape[1:3], device=keys.device) if unseen else self._mass_of_prompt(request, i, probes)
            )
        mass = found[0][None] if len(found) == 1 else torch.stack(found)
        return AttentionStats(mass[:, :, :0], mass)

    def _mass_of_prompt(self, request: AttendRequest, i: int, probes: Tensor, within: int | None = None) -> Tensor:
        """What the rows at `probes` of the i-th prompt of a request gave its tokens, or those `within` so many back from each:
        float32 `[kv_heads, T]`."""
        logits, (query, keys, _) = request.logits, request.given.of_rows(range(i, i + 1))
        normalisers = None if request.normalisers is None else request.normalisers[i : i + 1]
        behind = None if within is None else (0, within - 1)
        return attention_mass(query, keys, probes, logits.scale, logits.softcap, logits.sliding, behind, normalisers)[0]

    def _ids(self, forward: Forward, row: int) -> Tensor | None:
        """The token ids `[n]` that a row brings; None where no method asked for them."""
        return None if forward.ids is None else forward.real(forward.ids[:, None, :, None], [row])[0, 0, :, 0]

    def seen_by(self, rows: list[int], count: int) -> tuple[Tensor, Tensor]:
        """See `ForwardStats.of`."""
        return self.shown.of(rows, count, self.heads, self.tiers[0].pool.device)

    def measure(
        self, rows: list[int], role: str, tokens: Tensor, tier: int | None, order: Tensor | None = None
    ) -> None:
        """Fits what is measured of a stream to `tokens [len(rows), kv_heads, n, D]`, or to those at `order [..., m]`: of one
        tier, or of a whole chunk."""
        known = self.shown.extremes.get(role) if tier is None else None
        extremes = None if known is None else known.of_channels(tokens)
        for (own, key), transform in self.transforms.items():
            if own == role and transform.measured is not None and (key if isinstance(key, int) else None) == tier:
                queries = self.shown.queries_of(rows) if transform.measured.needs_queries else None
                transform.measure(rows, tokens, tokens if queries is None else queries, order, extremes)

    def permute(self, sources: Tensor, kept: list[list[int] | None]) -> None:
        """Row i becomes a copy of row `sources[i]`."""
        for transform in self.transforms.values():
            transform.permute(sources)
        for dictionary in self.dictionaries.values():
            dictionary.permute(sources)
        for number, pool in self._pools:
            pages = kept[number]
            if pages is not None:
                pool.keep(pages)
        for window in self.windows or ():
            window.permute(sources.to(window.tokens.device))
        for name in self.of_rows:
            setattr(self, name, getattr(self, name)[sources.to(getattr(self, name).device)])
        self.fit_rows()

    def to(self, device: torch.device) -> None:
        """Moves everything."""
        self.plan = self.plan.to(device)
        for number, (tier, plan) in enumerate(zip(self.tiers, self.plan.tiers, strict=True)):
            tier.plan = plan
            for role, stages in plan.streams():
                self._transform(role, number).to(device, stages.transform)
            tier.overflowed_outliers = None if tier.overflowed_outliers is None else tier.overflowed_outliers.to(device)
        for role, dictionary in self.dictionaries.items():
            dictionary.to(device, dict(self.plan.tiers[0].streams())[role].codec)
        for _, pool in self._pools:
            pool.to(device)
        for window in self.windows or ():
            window.tokens = window.tokens.to(device)
        for name in self.of_rows:
            setattr(self, name, getattr(self, name).to(device))

    def state(self) -> State:
        """See `stored`."""
        self.settle()
        return stored.state_of(self)

    def restore(self, state: State) -> None:
        """See `stored`."""
        stored.restore(self, state)

    def window_slots(self) -> int:
        """Slots of the window that any row uses."""
        return max((self.sequences.exact(row, length) for row, length in enumerate(self.sequences.lengths)), default=0)

    @abstractmethod
    def fit_rows(self) -> None:
        """Allocates what the rows that there are now need besides pages."""

    def counts(self, row: int) -> list[int]:
        """Tokens of a row in each tier."""
        return self.sequences.held(row, self.sequences.lengths[row])

    def decoded(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a row in each tier, float32 `[kv_heads, count, D]`, in the order of their slots."""
        found = []
        for number, (tier, count) in enumerate(zip(self.tiers, self.counts(row), strict=True)):
            row_params = [] if self.sequences.row_params is None else self.sequences.row_params.rows[row]
            keys, values = tier.decoded(row, self.sequences.tables[number].rows[row], count, row_params)
            if count and self.plan.before_rope and self.context.rotation is not None:
                keys = Rotation.rotated(keys, *self.context.rotation.at(self.positions(row, number)))
            found.append((keys, values))
        return found

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """See `Store.read_back`. Tiers that do not know their positions take tokens in order, one after the other."""
        tier, length, at = self.tiers[0], self.sequences.lengths[row], self.sequences.sinks
        keys, values = (
            torch.empty(self.heads, length, n, dtype=tier.dtype, device=tier.pool.device) for n in self.widths
        )
        for number, held in enumerate(self.decoded(row)):
            count = held[0].shape[1]
            positions = torch.arange(at, at + count, device=keys.device).expand(self.heads, -1)
            if self.tiers[number].knows_positions:
                positions = self.positions(row, number)
            for whole, part in zip((keys, values), held, strict=True):
                whole.scatter_(1, positions[..., None].expand_as(part), part.to(whole.dtype))
            at += count
        exact = self._exact_positions(row).to(keys.device)
        for whole, window in zip((keys, values), self.windows or (), strict=False):
            whole[:, exact] = window.tokens[row, :, : len(exact)]
        return keys, values

    def _exact_positions(self, row: int) -> Tensor:
        """Of the tokens in the exact window, its sinks and the newest: int64 `[n]` on the host."""
        length = self.sequences.lengths[row]
        exact = 0 if self.windows is None else self.sequences.exact(row, length)
        first = min(self.sequences.sinks, exact)
        return torch.cat([torch.arange(first), torch.arange(length - exact + first, length)])

    def positions(self, row: int, number: int) -> Tensor:
        """Which tokens of a row those of a tier that is `placed` are: int64 `[kv_heads, count]`."""
        tier, pages, count = self.tiers[number], self.sequences.tables[number].rows[row], self.counts(row)[number]
        found = tier.positions(torch.tensor([pages], dtype=torch.int32, device=tier.pool.device), 0, count)
        if isinstance(found, slice):
            return torch.arange(found.start, found.stop, device=tier.pool.device).expand(self.heads, -1)
        return found[0, :, :count]

    def tiers_of(self, row: int) -> list[HeldTier]:
        """Each tier's tokens, then the exact window's: its sinks and the newest."""
        found = []
        for number, (tier, count) in enumerate(zip(self.tiers, self.counts(row), strict=True)):
            keys, values = (tier.pool.bits_per_value(width, f"{role}.") for role, width in tier.widths.items())
            positions = self.positions(row, number).sort(-1).values if tier.knows_positions else None
            found.append(HeldTier(count, keys, values, positions))
        exact, bits = self._exact_positions(row).to(self.tiers[0].pool.device), 8.0 * self.itemsize
        found.append(HeldTier(len(exact), bits, bits, exact.expand(self.heads, -1)))
        return [tier for tier in found if tier.count]

    def footprint(self) -> Footprint:
        """Pages of every tier, and the rows' own numbers."""
        weight = Footprint(values=self.heads * sum(self.widths))
        for number, pool in self._pools:
            weight.kinds.update(pool.bytes_by_kind(self.sequences.tables[number].capacity))
        weight.kinds["outliers"] += sum(8 for tier in self.tiers if tier.overflowed_outliers is not None)
        weight.kinds["parameters"] += sum(transform.bytes() for transform in self.transforms.values())
        weight.kinds["dictionary"] += sum(dictionary.bytes() for dictionary in self.dictionaries.values())
        bytes_of = [tier.pool.bytes_per_token() for tier in self.tiers]
        weight.marginal = sum(share * size for share, size in zip(self.growth(), bytes_of, strict=False))
        draft = self.heads * sum(self.widths) + (self.query_values if self.observes else 0)
        weight.kinds["window"] += self.sequences.unconfirmed * len(self.sequences.lengths) * draft * self.itemsize
        return weight

    def on_host(self) -> list[Tensor]:
        """None."""
        return []

    def overflowed_outliers(self) -> int:
        """Of all tiers."""
        return counts_of(tier.overflowed_outliers for tier in self.tiers)

    @abstractmethod
    def growth(self) -> list[float]:
        """Tokens that each tier gains with one more token, in the long run."""
