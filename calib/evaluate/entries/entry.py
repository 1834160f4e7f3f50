"""The interface of a row of the table: it answers a column's batches, and its cache is measured."""

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

MAPPINGS = ("corrections", "low")  # options whose values are mappings of further options


@dataclass(frozen=True)
class Given:
    """The model and other inputs that every row gets.

    Attributes:
        model: the model in evaluation mode, on its device.
        seed: seed for methods that use random numbers.
        artifact: the artifact for rows that use one.
        identity: the model's fingerprint.
        tokenizer: the model's tokenizer, for rows that need its special tokens.
    """

    model: PreTrainedModel
    seed: int
    artifact: Artifact | None
    identity: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None


@dataclass(frozen=True)
class Entry(ABC):
    """A row of the table.

    Attributes:
        label: the row's unique name.
        group: the heading above it, "" for none.
        options: its options. A mapping gives a value for each column, by the column's title, unless it is `{keys: ..., values:
            ...}`; an option of `MAPPINGS` does so only if its values are mappings.
    """

    label: str
    group: str
    options: Mapping[str, Any]

    uses_artifact = False

    @property
    @abstractmethod
    def method(self) -> str:
        """Name of the method or cache."""

    def options_for(self, title: str) -> dict[str, Any]:
        """Returns the options for the column `title`; raises UsageError if a mapping has no value for it."""
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
        """Versions, by name, of packages that the row uses in addition to those that every cell depends on."""
        return {}

    @abstractmethod
    def all_options(self, title: str) -> dict[str, Any]:
        """Returns all options for the column `title` as plain JSON, including those at their default.

        Raises UsageError for invalid options; nothing has to be loaded for this check.
        """

    def serves(self, column: Column) -> bool:
        """Whether the row can be measured on that column."""
        return not column.reads_pages

    @abstractmethod
    def check(self, given: Given, column: Column) -> None:
        """Raises UsageError if the row cannot be used with the model or the column."""

    @abstractmethod
    def answers(self, given: Given, column: Column, batches: Sequence[Any]) -> Iterator[tuple[Any, CacheSize]]:
        """Yields, for each batch, its part of the column's figures, and the size of its cache at the end."""

    def counted_bits(self, given: Given, column: Column) -> float | None:
        """Bits per value as counted by the method's paper, for this column's lengths; None if there is no formula."""
        return None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context manager: turns ValueError, TypeError and ImportError into UsageError with the row's name."""
        try:
            yield
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(f"methods: '{self.label}': {error}") from error


class CacheEntry(Entry):
    """A row that answers each batch with the model and a new cache."""

    @abstractmethod
    def open(self, given: Given, title: str) -> Cache:
        """Returns an empty cache with the options for the column `title`; release it with `close`.

        Raises ValueError, TypeError or ImportError for options that are refused.
        """

    @abstractmethod
    def close(self, cache: Cache) -> None:
        """Detaches the cache from the model."""

    @abstractmethod
    def cache_size(self, given: Given, cache: Cache, tokens: int) -> CacheSize:
        """Returns the cache's size; `tokens` is the number of tokens without padding that it has seen, over all rows."""

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
            del cache  # frees memory before the next cache is made
            yield part, size


class Seen:
    """Counts the tokens without padding that the model feeds to one cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.fed: Any = 0

    def __call__(self, model: PreTrainedModel, args: Any, given: dict[str, Any]) -> None:
        """Forward pre-hook: take the count from the attention mask, which covers earlier tokens too, or add the new ids."""
        if cache_in(given) is not self.cache:
            return
        mask, ids = given.get("attention_mask"), given.get("input_ids", args[0] if args else None)
        self.fed = mask.sum() if mask is not None else self.fed + ids.numel()

    def tokens(self) -> int:
        """Returns the number of tokens over all rows."""
        return int(self.fed)


@contextmanager
def counting(model: PreTrainedModel, cache: Cache) -> Iterator[Seen]:
    """Context manager: counts the tokens without padding that the model feeds to the cache."""
    seen = Seen(cache)
    hook = model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def _has_names(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a mapping other than `{keys: ..., values: ...}`."""
    return is_mapping(value) and not is_per_stream(value)


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value of the configuration is a mapping."""
    return isinstance(value, Mapping)
