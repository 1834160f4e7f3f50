"""What to measure: one model, a list of methods, and a grid of batches and contexts, checked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from calib.bench.byte_sizes import parse_size
from calib.config_messages import unknown
from calib.errors import UsageError
from calib.evaluate.entries import CacheEntry, PeerEntry, read_entries
from calib.evaluate.request import DTYPES
from calib.runtime.messages.printable import printable

DEVICES = ("cpu", "cuda")
DYNAMIC = "DynamicCache"  # the default baseline
AGAIN = " again"  # suffix of the baseline's second row, whose speed relative to the first shows the noise
LISTS = ("methods", "contexts", "batches")  # keys with several values


@dataclass(frozen=True)
class BenchRequest:
    """What to measure. Raises UsageError for an invalid value.

    Attributes:
        name: the configuration's name, also that of the folder of its results.
        methods: rows of the tables, in order.
        model: a folder or a hub name.
        dtype: the model's dtype; `auto` is the dtype in which its weights are stored.
        device: `cpu`, `cuda` or a device such as `cuda:1`.
        artifact: the file that `calib fit` wrote for this model, or None.
        contexts: prompt lengths in tokens.
        batches: batch sizes.
        new_tokens: number of tokens that each row decodes after its prompt.
        turns: number of turns over which the new tokens are split; the prefill is repeated as often.
        baseline: name of the row that speeds are relative to, or None for the first; if a configuration names none, `of` uses a row
            with `DynamicCache` and adds one if there is none.
        memory: memory limit in bytes for the largest batch, or None for no search.
        threads: number of torch threads, or None for torch's default.
        seed: seed of the prompts, of the order of rows in each turn, and of methods that use random numbers.
    """

    name: str
    methods: tuple[CacheEntry, ...]
    model: str = "artifacts/tiny-llama"
    dtype: str = "auto"
    device: str = "cpu"
    artifact: str | None = None
    contexts: tuple[int, ...] = (1024,)
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 32
    turns: int = 4
    baseline: str | None = None
    memory: int | None = None
    threads: int | None = None
    seed: int = 20

    def __post_init__(self) -> None:
        for key, kind in (("model", str), ("device", str), ("artifact", str | None), ("baseline", str | None)):
            if not isinstance(getattr(self, key), kind) or getattr(self, key) == "":
                raise UsageError(f"invalid value {printable(getattr(self, key))} for '{key}' (expected text)")
        if self.dtype not in DTYPES:
            raise UsageError(f"invalid value {printable(self.dtype)} for 'dtype' (expected one of {', '.join(DTYPES)})")
        if self.device.partition(":")[0] not in DEVICES:
            raise UsageError(
                f"invalid value {printable(self.device)} for 'device' (expected cpu or cuda: others report no peak memory)"
            )
        for key, least in (("new_tokens", 2), ("turns", 2), ("threads", 1), ("seed", 0)):
            value = getattr(self, key)
            if (value is not None or key != "threads") and (type(value) is not int or value < least):
                raise UsageError(
                    f"invalid value {printable(value)} for '{key}' (expected a whole number, at least {least})"
                )
        for key in ("contexts", "batches"):
            for value in getattr(self, key):
                if type(value) is not int or value < 1:
                    raise UsageError(
                        f"invalid value {printable(value)} in '{key}' (expected whole numbers, at least 1)"
                    )
        if self.turns > self.new_tokens:
            raise UsageError(
                f"{self.turns} turns for {self.new_tokens} new tokens: a turn decodes one at least; "
                f"give turns={self.new_tokens} or fewer"
            )
        labels = [entry.label for entry in self.methods]
        if not labels:
            raise UsageError("no methods: give at least one under `methods`, or as --methods full kivi")
        for what, values in (("methods", labels), ("contexts", self.contexts), ("batches", self.batches)):
            twice = next((value for position, value in enumerate(values) if value in values[:position]), None)
            if twice is not None:
                raise UsageError(f"'{twice}' stands twice among the {what}: leave one out, or give it another `name`")
        if self.baseline is not None and self.baseline not in labels:
            raise UsageError(f"baseline '{self.baseline}' is no row's name (there are {', '.join(labels)})")
        again = (self.baseline or labels[0]) + AGAIN
        if again in labels:
            raise UsageError(
                f"the name '{again}' is reserved for the baseline's second row: give the other row another `name`"
            )
        for entry in self.methods:
            if entry.uses_artifact and self.artifact is None:
                raise UsageError(f"methods: '{entry.label}' wants the artifact: give artifact=FILE of `calib fit`")
            for context in self.contexts:
                entry.all_options(title_of(context))

    def check_positions(self, most: int | None) -> None:
        """Raises UsageError if prompt and new tokens exceed the model's `most` positions (None: unknown, no check)."""
        # One more token than is timed: the first step after a prompt is a warm-up.
        longest = max(self.contexts) + self.new_tokens + 1
        if most is not None and longest > most:
            raise UsageError(
                f"context {max(self.contexts)} and {self.new_tokens} new tokens need {longest} positions, and the model has "
                f"{most}; contexts up to {most - self.new_tokens - 1} fit"
            )

    @staticmethod
    def known() -> list[str]:
        """Returns the keys that a configuration may have."""
        return [field.name for field in fields(BenchRequest) if field.name != "name"]

    @staticmethod
    def of(content: Mapping[str, Any], name: str) -> "BenchRequest":
        """Builds the request from a configuration's content; raises UsageError that names the first error in it."""
        for key in content:
            if key not in BenchRequest.known():
                raise UsageError(unknown(str(key), BenchRequest.known()))
        rest = {key: value for key, value in content.items() if key != "methods"}
        for key in ("contexts", "batches"):
            if key in rest:
                if not isinstance(rest[key], list) or not rest[key]:
                    raise UsageError(f"'{key}' must be a list of whole numbers, got {printable(rest[key])}")
                rest[key] = tuple(rest[key])
        if rest.get("memory") is not None:
            rest["memory"] = parse_size(rest["memory"], "memory")
        methods = rows_of(content.get("methods"))
        if rest.get("baseline") is None and methods:
            methods, rest["baseline"] = with_dynamic(methods)
        return BenchRequest(name, methods, **rest)


def title_of(context: int) -> str:
    """Returns the key of a context in an option with a value for each context."""
    return f"{context} tokens"


def with_dynamic(methods: tuple[CacheEntry, ...]) -> tuple[tuple[CacheEntry, ...], str]:
    """Returns the rows, preceded by a row with transformers' `DynamicCache` if there is none, and that row's name."""
    for entry in methods:
        if isinstance(entry, PeerEntry) and entry.peer == "dynamic":
            return methods, entry.label
    return (PeerEntry(DYNAMIC, "", {}, "dynamic"), *methods), DYNAMIC


def rows_of(content: Any) -> tuple[CacheEntry, ...]:
    """Builds the rows from `methods`; a plain name is a method with its default options.

    Raises UsageError for invalid entries and for a file of answers.
    """
    if isinstance(content, list):
        content = [{"method": item} if isinstance(item, str) else item for item in content]
    found = []
    for entry in read_entries(content) if content else ():
        if not isinstance(entry, CacheEntry):
            raise UsageError(
                f"methods: '{entry.label}' is a file of answers, and only caches can be timed; leave it out"
            )
        found.append(entry)
    return tuple(found)
