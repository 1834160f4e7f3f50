"""What a row of the table is: something that answers a column's questions and whose cache is measured."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from calib.errors import UsageError
from calib.evaluate.cache_size import CacheSize
from calib.evaluate.tasks import Column
from calib.runtime import Artifact
from calib.runtime.cache_argument import cache_in
from calib.runtime.methods.per_stream import is_per_stream

MAPPINGS = ("corrections", "low")  # options that are mappings of options


@dataclass(frozen=True)
class Given:
    """What every row is run with.

    Attributes:
        model: in evaluation mode, on its device.
        seed: for methods that draw.
        artifact: for rows that use one.
        identity: the model's fingerprint.
        tokenizer: the model's, for rows that ask it which tokens are special.
    """

    model: PreTrainedModel
    seed: int
    artifact: Artifact | None
    identity: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None


@dataclass(frozen=True)
class Entry(ABC):
    """One row.

    Attributes:
        label: what the row is called; no two rows alike.
        group: the heading it stands under, "" for none.
        options: its own. A value that is a mapping holds one value a column, by the column's title, unless it is
            `{keys: ..., values: ...}`; those of `MAPPINGS`, mappings themselves, do where their values are mappings.
    """

    label: str
    group: str
    options: Mapping[str, Any]

    uses_artifact = False

    @property
    @abstractmethod
    def method(self) -> str:
        """The name of what answers."""

    def options_for(self, title: str) -> dict[str, Any]:
        """The options for the column `title`; raises UsageError where a mapping has no value for it."""
        found = {}
        for name, value in self.options.items():
            by_column = _has_names(value) and (name not in MAPPINGS or any(map(_has_names, value.values())))
            if by_column and title not in value:
                raise UsageError(
                    f"methods: '{self.label}': {name} has no value for the column '{title}' "
                    f"(it has {', '.join(map(repr, value)) or 'none'})"
                )
            found[name] = value[title] if by_column else value
        return found

    @property
    def packages(self) -> dict[str, str]:
        """Versions of packages that answer besides those which every cell depends on, by name."""
        return {}

    @abstractmethod
    def all_options(self, title: str) -> dict[str, Any]:
        """The options for the column `title`, those left at their default included, as plain JSON.

        Raises UsageError for what the row refuses, before anything is loaded.
        """

    def serves(self, column: Column) -> bool:
        """Whether the row can be asked that column's questions."""
        return not column.reads_pages

    @abstractmethod
    def check(self, given: Given, column: Column) -> None:
        """Raises UsageError for what the model or the column does not allow, before anything runs."""

    @abstractmethod
    def answers(self, given: Given, column: Column, batches: Sequence[Any]) -> Iterator[tuple[Any, CacheSize]]:
        """Of each batch its part of the column's figures, and the size of the cache at the end."""

    def counted_bits(self, given: Given, column: Column) -> float | None:
        """Bits a value as the paper counts them for this column's lengths; None where there is no such formula."""
        return None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside, whatever its options raise is the user's: UsageError with the row's name."""
        try:
            yield
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(f"methods: '{self.label}': {error}") from error


class CacheEntry(Entry):
    """A row that answers with a cache of its own for every batch."""

    @abstractmethod
    def open(self, given: Given, title: str) -> Cache:
        """An empty cache with the options for the column `title`; let go with `close`. Raises ValueError and the like."""

    @abstractmethod
    def close(self, cache: Cache) -> None:
        """Gives the model back."""

    @abstractmethod
    def cache_size(self, given: Given, cache: Cache, tokens: int) -> CacheSize:
        """The cache's size; `tokens` real tokens went through it, over all rows."""

    def check(self, given: Given, column: Column) -> None:
        with self.refusing():
            self.close(self.open(given, column.title))

    def answers(self, given: Given, column: Column, batches: Sequence[Any]) -> Iterator[tuple[Any, CacheSize]]:
        for batch in batches:
            cache = self.open(given, column.title)
            try:
                with counting(given.model, cache) as seen:
                    part = column.measure(cache, batch)
                size = self.cache_size(given, cache, seen.tokens())
            finally:
                self.close(cache)
            del cache  # before the next one is made
            yield part, size


class Seen:
    """Real tokens that went through one cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.fed: Any = 0

    def __call__(self, model: PreTrainedModel, args: Any, given: dict[str, Any]) -> None:
        """The hook before a forward: a mask counts what was fed before as well."""
        if cache_in(given) is not self.cache:
            return
        mask, ids = given.get("attention_mask"), given.get("input_ids", args[0] if args else None)
        self.fed = mask.sum() if mask is not None else self.fed + ids.numel()

    def tokens(self) -> int:
        """Over all rows."""
        return int(self.fed)


@contextmanager
def counting(model: PreTrainedModel, cache: Cache) -> Iterator[Seen]:
    """While it lasts, counts the real tokens that the model feeds the cache."""
    seen = Seen(cache)
    hook = model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def _has_names(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a mapping, and not the settings of keys and of values."""
    return is_mapping(value) and not is_per_stream(value)


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value of the configuration has names inside."""
    return isinstance(value, Mapping)
