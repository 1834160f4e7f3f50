"""Interfaces of tasks: a task is a frozen dataclass of options that makes columns; a column gives every method the same data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from calib.capture.generated import sampled_text
from calib.errors import RunError, UsageError
from calib.runtime.messages.printable import printable


@dataclass(frozen=True)
class Subject:
    """The evaluated model, and the settings with which columns make their data.

    Attributes:
        model: the model in evaluation mode, on its device.
        tokenizer: the model's tokenizer.
        seed: seed of the cases.
        batch_size: number of rows evaluated at once.
        limit: most rows of a column, or None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    seed: int
    batch_size: int
    limit: int | None

    def rows(self, wanted: int) -> int:
        """Returns `wanted`, but no more than the limit."""
        return wanted if self.limit is None else min(wanted, self.limit)

    def check_length(self, tokens: int, what: str, remedy: str) -> None:
        """Raises UsageError if `tokens` is more than the model's `max_position_embeddings`.

        `what` (the subject) and `remedy` are parts of the message.
        """
        config = self.model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and tokens > longest:
            raise UsageError(f"{what} takes {tokens} tokens and this model was made for {longest}; {remedy}")

    def sampled(self, first: int, length: int, count: int) -> Tensor:
        """Returns [count, length] int64: texts that begin with the token `first`, sampled from the model at temperature 1."""
        return sampled_text(self.model, first, length, count, self.seed)


class Column(Protocol):
    """One column of the table.

    Attributes:
        title: its heading, such as "20 lines".
        measure_name: name of the measure, such as "exact answers".
        settings: plain JSON of everything that its data depend on besides model and seed: equal settings give equal data.
        rows: number of rows.
        prompt: tokens of a row's first forward, mean over the rows.
        length: tokens of a row in the cache at the end, mean over the rows.
        reads_pages: whether it reads the pages of our own caches, which no other cache has.

    Optional attributes: `chance`, the share of exact answers that guessing gives (default 0; `calib/evaluate/unsolved.py`). For a
    plan (`calib/plan/eval_plan.py`): `longest_row`, tokens of the longest row in the cache (default `length`); `chunk`, tokens of
    each forward after the prompt (1); `passes`, forwards of a row's tokens for one answer (1); `logit_bytes`, bytes for each logit
    while answers are compared; `kept_bytes`, bytes of answers kept in host memory from one method to the next (0).
    """

    title: str
    measure_name: str
    settings: dict[str, Any]
    rows: int
    prompt: float
    length: float
    reads_pages: bool

    def batches(self) -> Sequence[Any]:
        """Returns the batches of data, the same for every method."""
        ...

    def measure(self, cache: Cache, batch: Any) -> Any:
        """Evaluates one batch with an empty cache and returns its part of the figures. Raises RunError for non-finite logits."""
        ...

    def summary(self, parts: Sequence[Any]) -> dict[str, float | int]:
        """Combines the parts of all batches into the figures of a cell."""
        ...

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns the figures with their intervals as text, for a page."""
        ...

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns the figures without intervals as text, for a terminal."""
        ...


@runtime_checkable
class Written(Column, Protocol):
    """A column whose cases can be written to a file for another program to answer (`calib/evaluate/cases.py`)."""

    def cases(self) -> dict[str, Any]:
        """Returns `kind`, `batches` and whatever else is needed, as plain JSON."""
        ...

    def read_part(self, batch: Any, content: Any) -> Any:
        """Converts a part from plain JSON to what `measure` returns for the batch. Raises RunError for a wrong shape."""
        ...


class Task(Protocol):
    """A task; its fields are the options with their defaults, and construction raises UsageError for values out of range."""

    def titles(self) -> list[str]:
        """Returns the titles of its columns."""
        ...

    def columns(self, subject: Subject) -> list[Column]:
        """Returns its columns for a model; raises UsageError if the model or its tokenizer cannot be used for the task."""
        ...


def whole_number(task: str, option: str, value: object, least: int) -> None:
    """Raises UsageError unless `value` is an int of at least `least`."""
    if type(value) is not int or value < least:
        raise UsageError(
            f"invalid value {printable(value)} for 'tasks.{task}.{option}' (a whole number, at least {least})"
        )


def check_title(task: str, title: object) -> None:
    """Raises UsageError unless `title` is one line of text without '|'."""
    if not isinstance(title, str) or not title.strip() or "\n" in title or "|" in title:
        raise UsageError(
            f"invalid value {printable(title)} for 'tasks.{task}.title' (expected a line of text without '|')"
        )


def numbers(content: Mapping[str, Any], name: str, count: int) -> Tensor:
    """Returns the list `content[name]` as [count] float64; raises RunError if it has not `count` numbers."""
    found = content.get(name, ())
    if len(found) != count or not all(type(number) in (int, float) for number in found):
        raise RunError(f"a part has {len(found)} numbers of '{name}', expected {count}")
    return torch.tensor(found, dtype=torch.float64)
