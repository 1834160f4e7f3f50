"""What a task is: a frozen dataclass of options that becomes columns; a column asks the same of every method."""

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
    """What is evaluated, and how the columns make their data.

    Attributes:
        model: in evaluation mode, on its device.
        tokenizer: the model's.
        seed: of the cases.
        batch_size: rows at once.
        limit: rows at most, or None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    seed: int
    batch_size: int
    limit: int | None

    def rows(self, wanted: int) -> int:
        """`wanted`, or the limit where that is less."""
        return wanted if self.limit is None else min(wanted, self.limit)

    def check_length(self, tokens: int, what: str, remedy: str) -> None:
        """Raises UsageError where `tokens` are more than the model was made for."""
        config = self.model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and tokens > longest:
            raise UsageError(f"{what} takes {tokens} tokens and this model was made for {longest}; {remedy}")

    def sampled(self, first: int, length: int, count: int) -> Tensor:
        """[count, length] int64: what the model says behind the token `first`, at temperature 1."""
        return sampled_text(self.model, first, length, count, self.seed)


class Column(Protocol):
    """One column of the table.

    Attributes:
        title: its heading, such as "20 lines".
        measure_name: what is measured, such as "exact answers".
        settings: plain JSON; everything its data depend on besides model and seed. Equal settings, equal data.
        rows: rows in all.
        prompt: tokens of a row's first forward, mean over the rows.
        length: tokens of a row in the cache at the end, mean over the rows.
        reads_pages: whether it looks into our own caches' pages, which no other cache has.

    A column may say more. What share of exact answers guessing has, as `chance`; without it that is 0
    (`calib/evaluate/unsolved.py`). For a plan (`calib/plan/eval_work.py`): tokens of its longest row in the cache, as `longest_row`
    (without it `length`); tokens of each forward behind the prompt, as `chunk` (1); forwards of a row's tokens for one answer,
    as `passes` (1); bytes of a logit while answers are compared, as `logit_bytes`; bytes of answers that are kept in host memory
    from one method to the next, as `kept_bytes` (0).
    """

    title: str
    measure_name: str
    settings: dict[str, Any]
    rows: int
    prompt: float
    length: float
    reads_pages: bool

    def batches(self) -> Sequence[Any]:
        """The data, made at the first call and the same for every method."""
        ...

    def measure(self, cache: Cache, batch: Any) -> Any:
        """One batch through an empty cache. Raises RunError for logits that are not finite."""
        ...

    def summary(self, parts: Sequence[Any]) -> dict[str, float | int]:
        """The figures of a cell out of its batches'."""
        ...

    def words(self, figures: dict[str, float | int]) -> str:
        """The figures with their interval, for a page."""
        ...

    def brief(self, figures: dict[str, float | int]) -> str:
        """The figures without it, for a terminal."""
        ...


@runtime_checkable
class Written(Column, Protocol):
    """A column whose cases others can answer from a file (`calib/evaluate/cases.py`)."""

    def cases(self) -> dict[str, Any]:
        """`kind` and `batches` with what else is needed, as plain JSON."""
        ...

    def read_part(self, batch: Any, content: Any) -> Any:
        """What `measure` would have returned for the batch, out of a part as plain JSON. Raises RunError for another shape."""
        ...


class Task(Protocol):
    """Fields are the options with their defaults; construction raises UsageError for values out of range."""

    def titles(self) -> list[str]:
        """The titles of its columns."""
        ...

    def columns(self, subject: Subject) -> list[Column]:
        """Its columns for a model; raises UsageError for what the model or its tokenizer cannot serve."""
        ...


def whole_number(task: str, option: str, value: object, least: int) -> None:
    """Raises UsageError unless `value` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise UsageError(
            f"invalid value {printable(value)} for 'tasks.{task}.{option}' (a whole number, at least {least})"
        )


def check_title(task: str, title: object) -> None:
    """Raises UsageError unless `title` is text of one line."""
    if not isinstance(title, str) or not title.strip() or "\n" in title or "|" in title:
        raise UsageError(
            f"invalid value {printable(title)} for 'tasks.{task}.title' (expected a line of text without '|')"
        )


def numbers(content: Mapping[str, Any], name: str, count: int) -> Tensor:
    """[count] float64 of the list `content[name]`; raises RunError for another number of them."""
    found = content.get(name, ())
    if len(found) != count or not all(type(number) in (int, float) for number in found):
        raise RunError(f"a part has {len(found)} numbers of '{name}', expected {count}")
    return torch.tensor(found, dtype=torch.float64)
