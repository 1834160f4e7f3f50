"""The common part of stores with tiers. `chunks`, `budget`, `prompt_budget`, `sinks` and `local` decide each token's tier and
slot."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from calib.kernels.probe_saliency.operation import attention_mass
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
from calib.runtime.stages.codec.corrected import counts_of
from calib.runtime.stages.parameter_width import may_need_fp32
from calib.runtime.stages.seeded_rng import SeededRng
from calib.runtime.stages.selection import Saliency
from calib.runtime.store import Footprint, LayerContext
from calib.runtime.tiered import stored
from calib.runtime.tiered.forward_stats import ForwardStats
from calib.runtime.tiered.row_contents import RowContents
from calib.runtime.tiered.row_dictionary import RowDictionary
from calib.runtime.tiered.row_transforms import RowTransforms
from calib.runtime.tiered.sequence_state import TieredSequenceState
from calib.runtime.tiered.spans import TieredTokens
from calib.runtime.tiered.tier import Tier


class TieredStore(ABC):
    """The tiers of one layer, and the statistics of a forward until it is stored.

    `plan` is a `TieredPlan`. Subclasses implement one tiering each.
    """

    windows: tuple[Window, Window] | None = None
    # Names of the subclass's own tensors whose first axis is the batch row.
    of_rows: tuple[str, ...] = ()

    def __init__(
        self, plan: Any, keys: Tensor, values: Tensor, sequences: TieredSequenceState, context: LayerContext
    ) -> None:
        """`keys`, `values [rows, kv_heads, n, head_dim]` are the first ones, which fix shapes and dtypes."""
        self.plan, self.sequences, self.context = plan, sequences, context
        self.rng = SeededRng(context.seed, context.layer)
        self.saliency: Saliency | None = plan.saliency
        self.heads, self.widths, self.itemsize = keys.shape[1], (keys.shape[3], values.shape[3]), keys.element_size()
        self.transforms = RowTransforms(plan.tiers, plan.kinds, keys, values)
        # By role, until the first tokens have decided between 16- and 32-bit parameters.
        self.extremes: dict[str, Extremes] = {}
        for role, like in (("keys", keys), ("values", values)):
            sides = [dict(tier.streams())[role] for tier in plan.tiers]
            measured = self.transforms.measured_keys(role)
            asks = bool(measured) and like.dtype != torch.float16
            asks |= any(may_need_fp32(side.codec, like.dtype, side.transform.growth) for side in sides)
            if asks and like.shape[2]:
                by_channel = any(not isinstance(key, int) for key in measured)
                self.extremes[role] = Extremes(like, by_channel)
        self.dictionaries = RowDictionary.of_streams(plan.tiers[0], keys, values, context)
        stores_positions = sequences.sliding is not None or plan.positions or self.needs_positions
        self.tiers = [
            Tier(
                tier,
                {role: self.transforms.of(role, number) for role in ("keys", "values")},
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
        """Whether every token's position in its row is stored."""
        return False

    @property
    def observes(self) -> bool:
        """Whether saliency decides; if not, storing needs neither queries nor probabilities."""
        return self.saliency is not None

    @abstractmethod
    def prompt_probes(self, row: int, length: int, ids: Tensor | None) -> Tensor:
        """The positions of a prompt's queries that are observed: int64 on the host, ascending."""

    @abstractmethod
    def watch(self, forward: Forward, rows: range, device: torch.device) -> Observed | None:
        """What is observed of a forward in which rows already hold tokens; None: nothing."""

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores a forward's tokens in tiers and windows."""
        if self.extremes:
            self.settle()
        self._store(forward, keys, values)
        self.shown.clear()

    @abstractmethod
    def _store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores a forward's tokens; the attention observed in the forward is in `self.shown`."""

    def settle(self) -> None:
        """Decides the width of parameters from the first tokens; called before anything is measured or written."""
        extremes = {role: own.read() for role, own in self.extremes.items()}
        self.shown.extremes, self.extremes = self.extremes, {}
        for tier in self.tiers:
            tier.settle(extremes)
        self.transforms.settle(extremes)

    def graph_key(self, forward: Forward) -> Hashable | None:
        """As `Store.graph_key`: None, unless the tiering supports replayed steps."""
        return None

    def encodes(self, forward: Forward) -> bool:
        """As `Store.encodes`."""
        return False

    def branch(self, forward: Forward) -> Hashable:
        """As `Store.branch`."""
        return None

    def shapes(self, forward: Forward) -> Hashable | None:
        """The part of `graph_key` common to all tierings; None with oracle eviction, which keeps another number of tokens in
        each step."""
        if self.plan.oracle_share is not None or any(forward.copies):
            return None
        # The number of pages that pools have after `prepare`.
        capacities = tuple(self.sequences.tables[number].capacity for number, _ in self._pools)
        return self.sequences.graph_key(forward), capacities

    def prepare(self, forward: Forward) -> None:
        """Makes room for the new pages of every tier, and copies shared ones."""
        for number, pool in self._pools:
            pool.grow(self.sequences.tables[number].capacity)
            if forward.copies[number]:
                pool.copy(forward.copies[number])

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention over tiers, window and new tokens. With `observe`, the attention mass is kept for `store`, or added at once
        where `watch` says so."""
        rows, given = request.rows, request.given
        observe = request.observe and self.observes
        self.query_values = given.query.shape[1] * given.query.shape[3]
        if observe:
            self.shown.queries[rows] = given.query.detach()
        if is_prompt(request):
            if not observe:
                return prompt(request)
            # Before the saliency, which the host prepares in part: meanwhile the device computes.
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
                torch.zeros(keys.shape[1:3], dtype=torch.float32, device=keys.device)
                if unseen
                else self._mass_of_prompt(request, i, probes)
            )
        mass = found[0][None] if len(found) == 1 else torch.stack(found)
        return AttentionStats(mass[:, :, :0], mass)

    def _mass_of_prompt(self, request: AttendRequest, i: int, probes: Tensor, within: int | None = None) -> Tensor:
        """The mass that the queries at `probes` of the i-th prompt in a request gave to its tokens; with `within`, only to the
        last so many tokens of each query. float32 `[kv_heads, T]`."""
        logits, (query, keys, _) = request.logits, request.given.of_rows(range(i, i + 1))
        normalisers = None if request.normalisers is None else request.normalisers[i : i + 1]
        behind = None if within is None else (0, within - 1)
        return attention_mass(query, keys, probes, logits.scale, logits.softcap, logits.sliding, behind, normalisers)[0]

    def _ids(self, forward: Forward, row: int) -> Tensor | None:
        """The token ids `[n]` of a row's new tokens; None where no method needs them."""
        return None if forward.ids is None else forward.real(forward.ids[:, None, :, None], [row])[0, 0, :, 0]

    def seen_by(self, rows: list[int], count: int) -> tuple[Tensor, Tensor]:
        """The observed mass on held slots and on `count` new tokens of `rows` (`ForwardStats.of`)."""
        return self.shown.of(rows, count, self.heads, self.tiers[0].pool.device)

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
        """Moves everything to `device`."""
        self.plan = self.plan.to(device)
        for number, (tier, plan) in enumerate(zip(self.tiers, self.plan.tiers, strict=True)):
            tier.plan = plan
            for role, stages in plan.streams():
                self.transforms.of(role, number).to(device, stages.transform)
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
        """Everything stored, for a file (`stored.state_of`)."""
        self.settle()
        return stored.state_of(self)

    def restore(self, state: State) -> None:
        """Fills the store from a file's state (`stored.restore`)."""
        stored.restore(self, state)

    def window_slots(self) -> int:
        """How many window slots the rows use at most."""
        return max((self.sequences.exact(row, length) for row, length in enumerate(self.sequences.lengths)), default=0)

    @abstractmethod
    def fit_rows(self) -> None:
        """Resizes what the present rows need besides pages."""

    def counts(self, row: int) -> list[int]:
        """How many tokens of a row are in each tier."""
        return RowContents(self, row).counts()

    def positions(self, row: int, number: int) -> Tensor:
        """See `RowContents.positions`."""
        return RowContents(self, row).positions(number)

    def decoded(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """See `RowContents.decoded`."""
        return RowContents(self, row).decoded()

    def read_back(self, row: int) -> tuple[Tensor, Tensor]:
        """See `RowContents.in_order`."""
        return RowContents(self, row).in_order()

    def tiers_of(self, row: int) -> list[HeldTier]:
        """See `RowContents.tiers`."""
        return RowContents(self, row).tiers()

    def footprint(self) -> Footprint:
        """Bytes of the pages of all tiers, of the rows' own parameters, and of unconfirmed tokens."""
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
        """None: everything is on the device."""
        return []

    def overflowed_outliers(self) -> int:
        """The sum over all tiers."""
        return counts_of(tier.overflowed_outliers for tier in self.tiers)

    @abstractmethod
    def growth(self) -> list[float]:
        """How many tokens each tier gains per new token, in the long run."""
