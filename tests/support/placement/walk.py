"""Runs a cache and an oracle for each row through the same steps; compares outputs, fetched, copied and stored tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import layer_walk
import pytest
import torch
from layer_walk import Tokens, feed
from placement import checks
from placement.layer import InfLLMRow, Row, Shown, SpeCacheRow, Tally
from placement.scenarios import Scenario, cut
from placement.spec import Blocks, exact, packed
from torch import Tensor
from walk_steps import Step

from calib.runtime.attend.request import AttendRequest
from calib.runtime.logits import Logits
from calib.runtime.offload.top_blocks import TopBlocksStore

STORED_EVERY = 10  # steps between two checks of all stored tokens; also after every forward of several columns
GUESS_EVERY = 4  # steps between two searches for values of speculative tokens
ENOUGH = 8  # a walk ends after more problems than this


class Walk:
    """One run of a scenario; `problems` are the differences found, `tally` counts the compared choices.

    `mattered` is the largest change of an output by fetched tokens, in tolerances; unless it is large, outputs do not test
    fetching.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.cache, self.twin = scenario, scenario.open(), scenario.open_twin()
        self.brought = scenario.tokens()
        self.at, self.number, self.columns, self.mattered = [0] * len(self.brought), 0, 0, 0.0
        self.problems: list[str] = []
        self.tally = Tally(wrong=self.problems)
        rows = len(scenario.steps[0].sizes)
        self.rows = [[self.empty_row() for _ in range(rows)] for _ in range(scenario.layers)]
        self.fetched = [0] * scenario.layers
        self.choices: dict[tuple[int, int], list[Shown]] = {}  # by (layer, row), for each chunk of a forward

    def run(self) -> "Walk":
        """Run all steps, and return this object."""
        with pytest.MonkeyPatch.context() as patch, filled():
            patch.setattr(layer_walk, "Logits", lambda usual: Logits(*astuple(self.scenario.attending)))
            patch.setattr(TopBlocksStore, "attend", self.noting(TopBlocksStore.attend))
            for number, step in enumerate(self.scenario.steps):
                self.number = number
                self.move(step.rows) if step.rows else self.forward(step)
                if len(self.problems) > ENOUGH:
                    break
        return self

    def note(self, where: str, problems: Iterator[str]) -> None:
        self.problems += [f"{where}: {problem}" for problem in problems]

    def noting(self, attend: Callable[[Any, AttendRequest], Tensor]) -> Callable[[Any, AttendRequest], Tensor]:
        """A wrapper of `attend` that records after each call which tokens are fetched for its rows."""

        def attend_and_note(store: Any, request: AttendRequest) -> Tensor:
            output = attend(store, request)
            for row in request.rows:
                self.choices.setdefault((store.context.layer, row), []).append(shown_in(store.pool, row))
            return output

        return attend_and_note

    # --- one step -----------------------------------------------------------------------------------------------------

    def move(self, sources: tuple[int, ...]) -> None:
        """Replace rows by copies of others, in caches and oracles."""
        for cache in filter(None, (self.cache, self.twin)):
            cache.batch_select_indices(torch.tensor(sources))
        self.rows = [[rows[source].again() for source in sources] for rows in self.rows]
        for layer, rows in enumerate(self.rows):
            for row, oracle in enumerate(rows):
                self.note(self.where(layer, row), checks.fetched_tokens(oracle, self.shown(layer, row)))
        self.check_stored()

    def forward(self, step: Step) -> None:
        """Run one forward of the cache, then of the oracles, which adopt its choices; compare both."""
        real = cut(self.brought, self.at, step.sizes)
        more: list[Tokens] | list[None] = [None] * len(real)
        if step.speculative:
            more = self.scenario.speculative_tokens(self.number, len(real))
        elif step.rejected:
            more = self.scenario.rejected_tokens(self.number, len(real), step.rejected)
        brought = [joined(new, token) for new, token in zip(real, more, strict=True)]
        drafts, padding = step.rejected is not None, len(set(step.sizes)) > 1
        low = [[self.low_of(layer, row) for row in range(len(real))] for layer in range(self.scenario.layers)]
        self.cache.sequences.speculating = step.speculative
        self.cache.sequences.recording = drafts
        self.choices.clear()
        outputs = feed(self.cache, brought, columns=max(map(len, brought)) + padding)
        self.cache.sequences.speculating = False
        self.columns += max(step.sizes) + padding
        if self.twin is not None and any(step.sizes):
            others = feed(self.twin, real, columns=max(step.sizes) + padding)
        rows = [[row.again() for row in own] for own in self.rows] if drafts else self.rows
        # Drafts of more than a chunk are attended by a copy of the store, which is dropped.
        apart = drafts and self.scenario.chunk is not None and max(map(len, brought)) > self.scenario.chunk
        expected = self.advance(rows, brought, low, step.speculative, apart)
        for layer, wanted in enumerate(expected):
            for row, output in wanted.items():
                where, found = self.where(layer, row), outputs[layer][row]
                self.note(where, checks.outputs(found, output))
                if self.scenario.method == "offload" and (size := step.sizes[row]):
                    full = others[layer][row].double()
                    self.note(f"{where}, full", checks.outputs(found[:, :size], full))
        if drafts:
            self.confirm(step, real, low)
        self.check_counts()
        if step.speculative and self.number % GUESS_EVERY == 1:
            self.note(f"step {self.number}", checks.no_guess(self.cache))
        last = self.number == len(self.scenario.steps) - 1
        if last or drafts or max(step.sizes) > 1 or self.number % STORED_EVERY == 0:
            self.check_stored()

    def advance(
        self, rows: list[list[Row]], brought: list[Tokens], low: Any, speculative: bool = False, apart: bool = False
    ) -> list[dict[int, Tensor]]:
        """Append a forward's tokens to the oracles `rows [layer][row]`; return the outputs of each row with new tokens, by layer.

        Fetched tokens are compared and counted, unless they lie `apart` in a copy of the store that is dropped afterwards.
        """
        outputs: list[dict[int, Tensor]] = [{} for _ in rows]
        for layer, own in enumerate(rows):
            for row, (oracle, new) in enumerate(zip(own, brought, strict=True)):
                where, shown, before = self.where(layer, row), self.shown(layer, row), oracle.fetched_pairs()
                if len(new):
                    given = tuple(getattr(new, name)[layer] for name in vars(new))
                    choices = self.choices.get((layer, row), [])
                    own_low = low[layer][row]
                    outputs[layer][row] = self.expected(oracle, given, speculative, own_low, shown, choices, where)
                if apart:
                    continue
                self.note(where, checks.fetched_tokens(oracle, shown))
                self.rows[layer][row].fetched_positions = oracle.fetched_positions
                if isinstance(oracle, InfLLMRow):  # a chunk may fetch tokens that the next chunk drops
                    self.fetched[layer] += oracle.copied if len(new) else 0
                else:
                    self.fetched[layer] += len(oracle.fetched_pairs() - before)
        return outputs

    def confirm(self, step: Step, accepted: list[Tokens], low: Any) -> None:
        """Reject the last drafts, and append the accepted ones to the oracles.

        If storing them depends on attention they are attended again, as a forward without the rejected ones, and fetch again.
        """
        self.choices.clear()
        self.cache.crop(-(step.rejected or 0))
        if self.scenario.method == "infllm" or self.store(0).observes:
            self.advance(self.rows, accepted, low)
            return
        for layer, rows in enumerate(self.rows):
            for oracle, new in zip(rows, accepted, strict=True):
                oracle.take(new.keys[layer], new.values[layer])

    def expected(
        self,
        oracle: Row,
        new: tuple[Tensor, ...],
        speculative: bool,
        low: Any,
        shown: Shown,
        choices: list[Shown],
        where: str,
    ) -> Tensor:
        """The oracle's outputs of one forward of one row; its real tokens are appended to the row."""
        query, keys, values = new
        if isinstance(oracle, InfLLMRow):
            return oracle.forward(query, keys, values, choices, self.tally, where)
        if not isinstance(oracle, SpeCacheRow) or not oracle.length:
            output, _ = oracle.exact(query, keys, values)
        elif speculative:
            count = packed(self.scenario.low, oracle.prompt, oracle.length + keys.shape[1] - 1)
            output, scores = oracle.speculative(query, keys, values, low, count)
            self.weigh(oracle, output, new, low)
            oracle.settle(scores, shown, self.tally, where)
        elif not oracle.wanted:
            output = oracle.output(query, keys, values, low)
        elif keys.shape[1] > 1:
            output, _ = oracle.exact(query, keys, values)
        else:
            count = packed(self.scenario.low, oracle.prompt, oracle.length)
            oracle.settle(oracle.select(query, keys, values, low, count), shown, self.tally, where)
            output = oracle.output(query, keys, values, low)
            self.weigh(oracle, output, new, low)
        real = keys.shape[1] - speculative
        oracle.take(keys[:, :real], values[:, :real])
        return output

    def weigh(self, oracle: SpeCacheRow, output: Tensor, new: tuple[Tensor, ...], low: Any) -> None:
        """Update `mattered` with the change of this output by fetched tokens."""
        if oracle.fetched_pairs() and self.mattered < 100:
            alone = oracle.again()
            alone.fetched_positions = oracle.fetched_positions[:, :0]
            change = (alone.output(*new, low) - output).abs().max() / output.abs().max()
            self.mattered = max(self.mattered, float(change / checks.OUTPUT[self.scenario.dtype]))

    # --- the state of the cache ---------------------------------------------------------------------------------------

    def where(self, layer: int, row: int) -> str:
        return f"step {self.number}, layer {layer}, row {row} (holds {self.rows[layer][row].length})"

    def store(self, layer: int) -> Any:
        return self.cache.compressed[layer].store

    def low_of(self, layer: int, row: int) -> tuple[Tensor, Tensor] | None:
        """Decoded keys and values of a row's low-bit copy in order of position: float64 `[kv_heads, length, D]` each."""
        if self.scenario.method != "specache" or not self.rows[layer][row].length:
            return None
        held = checks.held_by(self.store(layer).low, row)
        if held.positions is None:
            return held.keys, held.values
        order = held.positions.argsort(1)[..., None]
        return held.keys.take_along_dim(order, 1), held.values.take_along_dim(order, 1)

    def shown(self, layer: int, row: int) -> Shown:
        """The fetched tokens of a row and their pairs."""
        pool = getattr(self.store(layer), "pool", None)
        if pool is None:  # of `offload`
            return Shown(self.rows[layer][row].fetched_positions, self.rows[layer][row].keys[:, :0])
        return shown_in(pool, row)

    def check_counts(self) -> None:
        """Lengths and columns count no speculative tokens, and exactly the pairs that were not fetched before were copied."""
        where, lengths = f"step {self.number}", [row.length for row in self.rows[0]]
        if self.cache.sequences.lengths != lengths:
            self.problems.append(f"{where}: lengths {self.cache.sequences.lengths} and not {lengths}")
        if self.cache.get_seq_length() != self.columns:
            self.problems.append(f"{where}: {self.cache.get_seq_length()} columns and not {self.columns}")
        for layer, expected in enumerate(self.fetched):
            pool = getattr(self.store(layer), "pool", None)
            found = 0 if pool is None else int(pool.fetched)
            if found != expected:
                self.problems.append(f"{where}, layer {layer}: {found} pairs were copied, {expected} were not there")
                self.fetched[layer] = found

    def check_stored(self) -> None:
        """Check the tokens stored on the host and on the device."""
        for layer, rows in enumerate(self.rows):
            store = self.store(layer)
            for row, oracle in enumerate(rows):
                where = self.where(layer, row)
                if isinstance(oracle, InfLLMRow) and oracle.length:
                    self.note(where, checks.local(store.low, row, oracle))
                if isinstance(oracle, SpeCacheRow) and oracle.length:
                    self.note(where, checks.on_host(store.host, row, oracle))
                    if self.scenario.low["method"] == "kivi":
                        counts = exact(self.scenario.low, oracle.length)
                        self.note(where, checks.exact_window(store.low, row, oracle, counts))
                    # If attention decides a token's tier, fetched tokens change it, and the copy may differ from its method alone.
                    if not store.low.observes or not oracle.wanted or oracle.prompt == oracle.length:
                        self.note(where, checks.low_bit(store.low, self.twin.compressed[layer].store, row))

    def empty_row(self) -> Row:
        """An empty oracle of the method."""
        options, config = self.scenario.options, self.scenario.model.config
        nothing = torch.zeros(config.num_key_value_heads, 0, config.head_dim, dtype=self.scenario.dtype)
        held = self.scenario.attending, nothing, nothing, nothing[..., 0].long()
        if self.scenario.method == "specache":
            return SpeCacheRow(*held, wanted=options["k"])
        if self.scenario.method == "infllm":
            own = options.get("positions", "cache") == "original"
            return InfLLMRow(
                *held,
                blocks=Blocks(options["initial"], options["window"], options["block"]),
                count=options["representatives"],
                fetched=options["fetched"],
                chunk=self.scenario.chunk,
                frequencies=None if own else self.scenario.model.model.rotary_emb.inv_freq.double(),
            )
        return Row(*held)


def shown_in(pool: Any, row: int) -> Shown:
    """The fetched tokens of a row in a pool, and their pairs."""
    return Shown(pool.positions[row].clone(), pool.pairs[row].clone())


@contextmanager
def filled() -> Iterator[None]:
    """A context in which uninitialised tensors are filled with NaN, not with freed memory that may hold speculative tokens."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def joined(real: Tokens, more: Tokens | None) -> Tokens:
    """Real tokens followed by the speculative one or rejected drafts, if there are any."""
    if more is None:
        return real
    return Tokens(*(torch.cat([getattr(real, name), getattr(more, name)], 2) for name in vars(real)))
