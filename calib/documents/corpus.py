"""Plain text: local files, or a data set of the Hugging Face hub; nothing is fetched unless named."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from calib.errors import RunError, UsageError
from calib.runtime.messages.printable import printable, shortened

# WikiText keeps the spacing of its tokeniser: `role @-@ playing`, `Japan , it`. Written text has none of it.
JOINED = re.compile(r" @([-,.])@ ")
BEFORE = re.compile(r" ([,.;:!?%)\]}]|'s\b|'t\b|'re\b|'ve\b|'d\b|'ll\b|'m\b|n't\b)")
AFTER = re.compile(r"([(\[{$£]) ")
REASON = 300  # characters of what the library says
QUOTED = re.compile(r'(^| )" ([^"\n]*?) "(?= |$)', re.MULTILINE)


def natural_spacing(text: str) -> str:
    """The text with WikiText's tokenised spacing taken back to that of written English; line structure is kept."""
    text = JOINED.sub(r"\1", text)
    text = QUOTED.sub(r'\1"\2"', text)  # before the commas, which close up to the quotation mark
    text = BEFORE.sub(r"\1", text)
    return AFTER.sub(r"\1", text)


@dataclass
class TextSource:
    """Where text comes from.

    Attributes:
        text: local text files (UTF-8), read in this order; when any is given, the hub is not asked.
        name: data set on the Hugging Face hub.
        config: its configuration.
        split: its split.
        column: the column that holds the text.
        natural_spacing: take WikiText's tokenised spacing (` @-@ `, ` ,`) back to written English on reading.
    """

    text: list[Path] = field(default_factory=list)
    name: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"
    natural_spacing: bool = True

    def read(self) -> str:
        """The whole text. Raises UsageError for what is not there or empty, RunError for what the hub does not give."""
        text = "\n".join(read_file(path) for path in self.text) if self.text else self.read_hub()
        if not text.strip():
            raise UsageError(f"the corpus {self.label} is empty: name a file that holds text")
        return natural_spacing(text) if self.natural_spacing else text

    @property
    def label(self) -> str:
        """What the source is called in provenance: file names or the hub's name, never a folder."""
        if self.text:
            return ", ".join(path.name for path in self.text)
        return " ".join(str(part) for part in (self.name, self.config, self.split) if part)

    def read_hub(self) -> str:
        """The split's column, joined."""
        if not self.name:
            raise UsageError("no text: give local files (text: [FILE, ...]) or a hub data set (name: OWNER/NAME)")
        import datasets  # only when the hub is asked for

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split)
        except Exception as error:  # of many types: only its words tell a missing split from a missing network
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
    """A UTF-8 file; UsageError names the path when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read text file {path}: {reason}") from error


def text_hash(text: str) -> str:
    """SHA-256 of the text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
