"""Reads plain text from local files, or from a data set of the Hugging Face hub if one is named."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from calib.errors import RunError, UsageError
from calib.runtime.messages.printable import printable, shortened

# WikiText keeps the spacing of its tokeniser: `role @-@ playing`, `Japan , it`. These patterns find it.
JOINED = re.compile(r" @([-,.])@ ")
BEFORE = re.compile(r" ([,.;:!?%)\]}]|'s\b|'t\b|'re\b|'ve\b|'d\b|'ll\b|'m\b|n't\b)")
AFTER = re.compile(r"([(\[{$£]) ")
REASON = 300  # most characters of the library's message
QUOTED = re.compile(r'(^| )" ([^"\n]*?) "(?= |$)', re.MULTILINE)


def natural_spacing(text: str) -> str:
    """Returns the text with WikiText's tokenised spacing replaced by that of written English; line structure is kept."""
    text = JOINED.sub(r"\1", text)
    text = QUOTED.sub(r'\1"\2"', text)  # before BEFORE, which joins a comma to the quotation mark in front of it
    text = BEFORE.sub(r"\1", text)
    return AFTER.sub(r"\1", text)


@dataclass
class TextSource:
    """A source of text: local files or a data set on the hub.

    Attributes:
        text: local text files (UTF-8), read in this order; if any is given, the hub is not used.
        name: data set on the Hugging Face hub.
        config: the data set's configuration.
        split: the data set's split.
        column: the column that holds the text.
        natural_spacing: replace WikiText's tokenised spacing (` @-@ `, ` ,`) by that of written English on reading.
    """

    text: list[Path] = field(default_factory=list)
    name: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"
    natural_spacing: bool = True

    def read(self) -> str:
        """Returns the whole text. Raises UsageError if it is missing or empty, RunError if the hub does not give it."""
        text = "\n".join(read_file(path) for path in self.text) if self.text else self.read_hub()
        if not text.strip():
            raise UsageError(f"the corpus {self.label} is empty: name a file that holds text")
        return natural_spacing(text) if self.natural_spacing else text

    @property
    def label(self) -> str:
        """The source's name in provenance: file names, or name, config and split on the hub; never a folder."""
        if self.text:
            return ", ".join(path.name for path in self.text)
        return " ".join(str(part) for part in (self.name, self.config, self.split) if part)

    def read_hub(self) -> str:
        """Returns the texts of the split's column, joined, each ending in a line break. Raises as `read`."""
        if not self.name:
            raise UsageError("no text: give local files (text: [FILE, ...]) or a hub data set (name: OWNER/NAME)")
        import datasets  # only when the hub is asked for

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split)
        except Exception as error:  # of many types; only the message tells a missing split from a missing network
            reason = shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", REASON)
            raise RunError(
                f"cannot get {self.label} ({reason}); check its name, config and split; "
                "without network give local text files instead: text: [FILE, ...]"
            ) from error
        if self.column not in rows.column_names:
            raise UsageError(f"{self.label} has no column '{self.column}' (one of {', '.join(rows.column_names)})")
        texts = ["" if row is None else row for row in rows[self.column]]  # data sets hold nulls for empty texts
        if (other := next((row for row in texts if not isinstance(row, str)), None)) is not None:
            raise UsageError(
                f"{self.label}: column '{self.column}' holds {printable(other)}, expected text; name another one "
                f"(of {', '.join(rows.column_names)})"
            )
        return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)


def read_file(path: Path) -> str:
    """Returns the text of a UTF-8 file; raises UsageError, which names the path, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read text file {path}: {reason}") from error


def text_hash(text: str) -> str:
    """Returns the SHA-256 of the text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
