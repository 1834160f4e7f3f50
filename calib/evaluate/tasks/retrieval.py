"""Line retrieval: a prompt of keyed lines is read into the cache, and the model is asked for the numbers of some of them.

    line rain: 4821 / line milk: 1190 / ... / ? / line milk:        -> 1190 / line rain:        -> 4821

The cases are from the evaluation split (`calib.documents.splits`): its pairs of key and number, and of neighbouring keys, are not
in the training split. With several `queries` each case is asked for several of its lines, one after another; the first is the one
that a single query asks for. Answers are scored with teacher forcing (`answers.py`).
"""

from dataclasses import asdict, dataclass

from calib.documents.generators import POOLS, Keys, Piece, Style, keyed_lines, keyed_random
from calib.errors import UsageError
from calib.evaluate.tasks.answers import AnswersColumn
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.runtime.messages.printable import printable


@dataclass(frozen=True)
class Retrieval:
    """A task with one column for each number of lines.

    Args:
        lines: number of keyed lines before the question, for each column.
        cases: independent cases of a column.
        queries: number of different lines that each case is asked for, one after another.
        digits: digits of the numbers.
        style: `line` (`line rain: 4821`) or `plain` (`rain 4821`).
        keys: `words` or `numbers`.
        title: text after the number of lines in a column's title.
        chat_template: use the tokenizer's chat template: lines and question are the user's turn, the number is the assistant's
            text.
    """

    lines: tuple[int, ...] = (20,)
    cases: int = 200
    queries: int = 1
    digits: int = 4
    style: Style = "line"
    keys: Keys = "words"
    title: str = "lines"
    chat_template: bool = False

    def __post_init__(self) -> None:
        lines = [self.lines] if type(self.lines) is int else self.lines
        if not isinstance(lines, list | tuple) or not lines:
            raise UsageError(f"invalid value {printable(lines)} for 'tasks.retrieval.lines' (a list of whole numbers)")
        object.__setattr__(self, "lines", tuple(lines))
        options = (("cases", self.cases), ("queries", self.queries), ("digits", self.digits))
        for option, value in (*(("lines", count) for count in lines), *options):
            whole_number("retrieval", option, value, 1)
        if self.queries > min(self.lines):
            raise UsageError(
                f"invalid value {self.queries} for 'tasks.retrieval.queries' (at most {min(self.lines)}, the fewest lines)"
            )
        for option, value, known in (("style", self.style, ("line", "plain")), ("keys", self.keys, tuple(POOLS))):
            if value not in known:
                choices = ", ".join(known)
                raise UsageError(f"invalid value {printable(value)} for 'tasks.retrieval.{option}' (one of {choices})")
        check_title("retrieval", self.title)
        check_chat("retrieval", self.chat_template)
        try:
            for count in self.lines:
                self.document(0, 0, count)
        except ValueError as error:
            raise UsageError(f"tasks.retrieval: {error}") from error

    def document(self, seed: int, index: int, lines: int) -> list[Piece]:
        """Returns case `index` with `lines` keyed lines; raises ValueError if there are not enough keys."""
        rng = keyed_random("retrieval", seed, index, lines, self.digits, self.style, "eval", self.keys)
        return list(keyed_lines(rng, lines, self.queries, self.digits, self.style, "eval", self.keys))

    def title_of(self, lines: int) -> str:
        """Returns the title of the column for `lines` lines."""
        return f"{lines} {self.title}" if self.queries == 1 else f"{self.queries} of {lines} {self.title}"

    def titles(self) -> list[str]:
        """Returns the titles "20 lines", "40 lines", ...; with several queries "4 of 20 lines", ..."""
        return [self.title_of(count) for count in self.lines]

    def columns(self, subject: Subject) -> list[Column]:
        """Generates and tokenises the cases; raises UsageError for cases beyond the model's positions, and for a missing chat
        template."""
        return [LinesColumn(self, count, subject) for count in self.lines]


class LinesColumn(AnswersColumn):
    """Cases with one number of lines; with several queries there is also a share of exact answers for each query.

    Attributes:
        chance: probability that the number of a random line is right.
    """

    def __init__(self, task: Retrieval, lines: int, subject: Subject) -> None:
        rows, queries = subject.rows(task.cases), task.queries
        options = {
            key: value for key, value in asdict(task).items() if key not in ("lines", "cases", "title", "chat_template")
        }
        if queries == 1:
            del options["queries"]  # keeps the settings of releases without this option
        settings = {"task": "retrieval", "lines": lines, "cases": rows, **options}
        documents = [task.document(subject.seed, index, lines) for index in range(rows)]
        parts = [f"query {number}" for number in range(1, queries + 1)] if queries > 1 else []
        what, remedy = f"retrieval from {lines} lines", "ask for fewer lines"
        self.chance = 1 / lines
        chat = Chat(subject.tokenizer, "retrieval") if task.chat_template else None
        super().__init__(subject, task.title_of(lines), settings, documents, [parts] * rows, what, remedy, chat)
