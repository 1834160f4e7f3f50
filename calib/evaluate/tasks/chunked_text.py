"""Base of tasks that feed text through a cache as a prefill and then chunks, so that later tokens attend to compressed ones.

Tokens of one chunk attend to each other exactly, as in every forward, so small chunks show more of the compression and take longer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from calib.documents.corpus import TextSource
from calib.errors import UsageError
from calib.evaluate.tasks.contract import Subject, check_title, whole_number
from calib.evaluate.tasks.text import Text, TextSequences, text_source


@dataclass(frozen=True)
class ChunkedText:
    """Options of a task with one column that reads text in chunks.

    Args:
        text: a UTF-8 file, a list of them, a data set of the hub as {name:, config:, split:, column:}, or None: text
            sampled from the model itself at temperature 1, which needs no network.
        natural_spacing: turn WikiText's tokenised spacing (` @-@ `, ` ,`) back into written English.
        prefill: tokens of a sequence's first forward, which are not scored.
        chunk: tokens of each later forward.
        length: tokens in a sequence.
        tokens: number of scored tokens in total, rounded up to whole sequences.
        title: the column's title.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]  # what is done with the tokens after the prefill, for a message

    text: Text = None
    natural_spacing: bool = False
    prefill: int = 256
    chunk: int = 16
    length: int = 512
    tokens: int = 4096
    title: str = ""

    def __post_init__(self) -> None:
        for option, least in (("prefill", 1), ("chunk", 1), ("length", 2), ("tokens", 1)):
            whole_number(self.name, option, getattr(self, option), least)
        if self.prefill >= self.length:
            raise UsageError(
                f"tasks.{self.name}: prefill={self.prefill} leaves nothing to {self.purpose} "
                f"in sequences of length={self.length}"
            )
        check_title(self.name, self.title)
        self.source()

    def source(self) -> TextSource | None:
        """Returns the source of the text; None if it is sampled."""
        return text_source(self.name, self.text, self.natural_spacing)

    def titles(self) -> list[str]:
        """Returns the title of its only column."""
        return [self.title]

    @property
    def counted(self) -> int:
        """Number of scored tokens of a sequence."""
        return self.length - self.prefill


class ChunkedTextColumn:
    """Base of columns with sequences of one text; a subclass adds the measure."""

    reads_pages = False

    def __init__(self, task: ChunkedText, subject: Subject) -> None:
        self.title, self.task, self.subject = task.title, task, subject
        count = -(-task.tokens // task.counted)
        self.text = TextSequences(task.name, task.source(), subject, task.length, count)
        self.rows = self.text.count
        numbers = {"prefill": task.prefill, "chunk": task.chunk, "length": task.length, "sequences": self.rows}
        self.settings: dict[str, Any] = {"task": task.name, **self.text.origin, **numbers}
        self.prompt, self.chunk = float(task.prefill), task.chunk
