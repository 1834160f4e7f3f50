"""Text for tasks: from local files, a data set of the hub, or sampled from the model itself."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from calib.capture.corpus import text_sequences
from calib.capture.language_model import without_waiting_for_the_hub
from calib.config_messages import unknown
from calib.documents.corpus import TextSource, text_hash
from calib.errors import UsageError
from calib.evaluate.tasks.contract import Subject
from calib.runtime.messages.printable import printable

Text = str | Sequence[str] | Mapping[str, str] | None
SAMPLED = "sampled from the model"
HUB = ("name", "config", "split", "column")


def text_source(task: str, text: Text, natural_spacing: bool) -> TextSource | None:
    """Returns the source that a task's option `text` names; None if the text is sampled. Raises UsageError for invalid options."""
    if not isinstance(natural_spacing, bool):
        raise UsageError(f"'tasks.{task}.natural_spacing' must be true or false, got {printable(natural_spacing)}")
    if text is None:
        return None
    if isinstance(text, Mapping):
        for key in text:
            if key not in HUB:
                raise UsageError(unknown(f"tasks.{task}.text.{key}", [f"tasks.{task}.text.{k}" for k in HUB]))
        if not text.get("name"):
            raise UsageError(f"'tasks.{task}.text' of the hub needs a name: {{name: OWNER/DATASET, split: test}}")
        return TextSource(natural_spacing=natural_spacing, **text)
    files = [text] if isinstance(text, str) else text
    if not isinstance(files, list | tuple) or not files or not all(isinstance(file, str) for file in files):
        raise UsageError(f"'tasks.{task}.text' must be a file, a list of files or null, got {printable(text)}")
    missing = next((file for file in files if not Path(file).is_file()), None)
    if missing is not None:
        raise UsageError(f"tasks.{task}.text: no file '{missing}'; null samples text from the model instead")
    return TextSource(text=[Path(file) for file in files], natural_spacing=natural_spacing)


def read_text(source: TextSource | None) -> tuple[str | None, dict[str, Any]]:
    """Returns the text (None if it is sampled) and its origin as plain JSON."""
    if source is None:
        return None, {"text": SAMPLED}
    with without_waiting_for_the_hub():
        text = source.read()
    return text, {"text": source.label, "sha256": text_hash(text)}


def sampled(task: str, subject: Subject, length: int, count: int) -> Tensor:
    """Samples [count, length] int64 that begin with the tokenizer's first token; raises UsageError if it has none."""
    tokenizer = subject.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise UsageError(f"tasks.{task}: this tokenizer has no first token to sample after; give text=FILE")
    return subject.sampled(first, length, count)


class TextSequences:
    """Sequences of equal length from one text.

    Args:
        task: the task's name, for messages.
        source: source of the text; None: it is sampled from the model.
        subject: the evaluated model, tokenizer and settings.
        length: tokens in a sequence.
        count: most sequences.

    Attributes:
        origin: plain JSON: the text's name, and its SHA-256 unless it is sampled.
        count: number of sequences; fewer than requested if the text is shorter.

    Raises:
        UsageError: if sequences are longer than the model's positions, or the text does not fill one.
    """

    def __init__(self, task: str, source: TextSource | None, subject: Subject, length: int, count: int) -> None:
        subject.check_length(length, task, "give a smaller length")
        self.task, self.subject, self.length, self.count = task, subject, length, subject.rows(count)
        self._text, self.origin = read_text(source)
        if self._text is not None:
            self.count = len(self.tokens)

    @cached_property
    def tokens(self) -> Tensor:
        """The sequences [count, length] int64, each beginning with the tokenizer's first token; sampled at the first access."""
        if self._text is None:
            return sampled(self.task, self.subject, self.length, self.count)
        tokenizer, seed = self.subject.tokenizer, self.subject.seed
        try:
            return text_sequences(self._text, tokenizer, self.length, self.count, seed, self.task)
        except UsageError as error:
            raise UsageError(
                f"tasks.{self.task}: the text does not fill one sequence of {self.length} tokens; "
                "give more text or a smaller length"
            ) from error

    def batches(self) -> list[Tensor]:
        """Returns the sequences on the model's device, as tensors [at most batch_size, length]."""
        return list(self.tokens.to(self.subject.model.device).split(self.subject.batch_size))
