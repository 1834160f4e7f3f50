"""Needle in a haystack: one sentence is hidden in running text at a given depth, and the prompt ends with a question about it.

    numbers         ... was built in 1906. The number of rain is 4821. The church ... / ? /  The number of rain is       -> 4821
    san_francisco   the sentence of the first such test (github.com/gkamradt/LLMTest_NeedleInAHaystack), or one of your own

Depth 0 is before the first sentence, 1 after the last. With `numbers` every case has its own word, number and section of the text
(`calib.documents.generators.needles`, evaluation split), and is scored like line retrieval. Any other needle is the same in every
case; the model generates an answer, which is right if it contains all expected texts. A column's figures are the share of right
answers over all depths and at each depth, so that columns of several lengths form a grid of depth by length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from calib.config_messages import unknown
from calib.documents.corpus import TextSource
from calib.documents.generators import Piece, keyed_random, needles
from calib.documents.running_text import RunningText
from calib.errors import UsageError
from calib.evaluate.tasks.answers import AnswersColumn
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.generated import GeneratedColumn, Question, tokens_of
from calib.evaluate.tasks.haystack import anywhere, case_depths, check_grid, check_lengths, filled, running_text
from calib.evaluate.tasks.text import Text, read_text, sampled, text_source
from calib.runtime.messages.printable import printable

SAMPLED_SEQUENCES, SAMPLED_TOKENS = 32, 128  # size of sampled text; a longer haystack repeats it
NUMBERS = "numbers"


@dataclass(frozen=True)
class Sentence:
    """A needle that is a fixed sentence.

    Attributes:
        sentence: the hidden sentence.
        question: the question after the text.
        expected: texts that a right answer contains, ignoring case.
    """

    sentence: str
    question: str
    expected: tuple[str, ...]


SENTENCES = {
    "san_francisco": Sentence(
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
        "What is the best thing to do in San Francisco?\nAnswer:",
        ("sandwich", "Dolores Park", "sunny day"),
    )
}


@dataclass(frozen=True)
class Needle:
    """A task with one column for each length.

    Args:
        lengths: most tokens of a row, question and answer included; a row has as many whole sentences as fit.
        depths: depths of the needle, as shares of the sentences before it.
        cases: independent cases at each depth.
        needle: `numbers`, `san_francisco`, or a custom one as {sentence:, question:, expected: [texts of its answer]}.
        digits: digits of each number, for `numbers`.
        new_tokens: most new tokens of a generated answer (not for `numbers`).
        text: the text that the needle is hidden in: a UTF-8 file, a list of them, a data set of the hub as {name:, config:,
            split:, column:}, or None: text sampled from the model itself at temperature 1, which needs no network.
        natural_spacing: turn WikiText's tokenised spacing (` @-@ `, ` ,`) back into written English.
        title: text before the length in a column's title.
        chat_template: use the tokenizer's chat template, whose tokens count for `lengths` as well: text and question are the
            user's turn, the answer is the assistant's text.
    """

    lengths: tuple[int, ...] = (512,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    cases: int = 20
    needle: str | Mapping[str, Any] = NUMBERS
    digits: int = 4
    new_tokens: int = 32
    text: Text = None
    natural_spacing: bool = False
    title: str = "needle"
    chat_template: bool = False

    def __post_init__(self) -> None:
        check_grid("needle", self)
        whole_number("needle", "digits", self.digits, 1)
        whole_number("needle", "new_tokens", self.new_tokens, 1)
        check_title("needle", self.title)
        check_chat("needle", self.chat_template)
        self.source()
        self.sentence()

    def source(self) -> TextSource | None:
        """Returns the source of the text; None if it is sampled."""
        return text_source("needle", self.text, self.natural_spacing)

    def sentence(self) -> Sentence | None:
        """Returns the needle's fixed sentence, or None for `numbers`. Raises UsageError for an invalid needle."""
        if isinstance(self.needle, Mapping):
            return sentence_of(self.needle)
        if self.needle == NUMBERS:
            return None
        if not isinstance(self.needle, str) or self.needle not in SENTENCES:
            known = ", ".join([NUMBERS, *SENTENCES])
            raise UsageError(
                f"invalid value {printable(self.needle)} for 'tasks.needle.needle' "
                f"(one of {known}, or {{sentence:, question:, expected:}})"
            )
        return SENTENCES[self.needle]

    def titles(self) -> list[str]:
        """Returns the titles "needle 512", "needle 1024", ..."""
        return [f"{self.title} {length}" for length in self.lengths]

    def columns(self, subject: Subject) -> list[Column]:
        """Reads or samples the text and hides the needles; raises UsageError for lengths that are too long for the model or too
        short for the needle."""
        check_lengths("needle", self, subject)
        chat = Chat(subject.tokenizer, "needle") if self.chat_template else None
        text, origin = read_text(self.source())
        if text is None:
            tokens = sampled("needle", subject, SAMPLED_TOKENS, SAMPLED_SEQUENCES)
            text = "\n".join(subject.tokenizer.batch_decode(tokens, skip_special_tokens=True))
        running, sentence = running_text("needle", subject, text), self.sentence()
        if sentence is None:
            return [NumbersColumn(self, length, running, origin, subject, chat) for length in self.lengths]
        return [WordsColumn(self, sentence, length, running, origin, subject, chat) for length in self.lengths]


class NumbersColumn(AnswersColumn):
    """Rows of one length with a hidden word and number each."""

    def __init__(
        self,
        task: Needle,
        length: int,
        running: RunningText,
        origin: dict[str, Any],
        subject: Subject,
        chat: Chat | None,
    ) -> None:
        rows = case_depths(task, subject)
        documents = [document(subject, running, length, depth, task.digits, index, chat) for index, depth in rows]
        numbers = {"length": length, "depths": list(task.depths), "cases": len(rows), "digits": task.digits}
        parts, title = [[f"depth {depth:g}"] for _, depth in rows], f"{task.title} {length}"
        settings = {"task": "needle", **origin, **numbers}
        super().__init__(subject, title, settings, documents, parts, title, "give a smaller length", chat)


class WordsColumn(GeneratedColumn):
    """Rows of one length with the same hidden sentence."""

    def __init__(
        self,
        task: Needle,
        sentence: Sentence,
        length: int,
        running: RunningText,
        origin: dict[str, Any],
        subject: Subject,
        chat: Chat | None,
    ) -> None:
        rows, new = case_depths(task, subject), task.new_tokens
        questions = [question(subject, running, length, depth, sentence, new, index, chat) for index, depth in rows]
        settings = {**origin, "length": length, "depths": list(task.depths)}
        settings |= {"sentence": sentence.sentence, "question": sentence.question, "expected": list(sentence.expected)}
        parts, title = [f"depth {depth:g}" for _, depth in rows], f"{task.title} {length}"
        super().__init__(subject, "needle", title, settings, questions, holds_all, new, (), chat, None, parts)


def document(
    subject: Subject,
    running: RunningText,
    length: int,
    depth: float,
    digits: int,
    index: int,
    chat: Chat | None,
) -> Sequence[Piece]:
    """Returns case `index` at `depth`: a word's number in at most `length` tokens, including its answer and the chat template."""
    key = ("needle", subject.seed, index, length, depth, digits)

    def hide(sentences: Sequence[str]) -> Sequence[Piece]:
        # The generator draws the same word and number for any sentences.
        return list(needles(keyed_random(*key), sentences, [depth], digits, "eval"))

    candidates = anywhere(running, keyed_random(*key, "place"))
    return filled("needle", length, running, candidates, hide, lambda pieces: tokens_in(subject, pieces, chat))


def question(
    subject: Subject,
    running: RunningText,
    length: int,
    depth: float,
    sentence: Sentence,
    new: int,
    index: int,
    chat: Chat | None,
) -> Question:
    """Returns case `index` at `depth`: the sentence in at most `length` tokens, including `new` answer tokens and the template."""

    def hide(sentences: Sequence[str]) -> Question:
        at = round(depth * len(sentences))
        before, after = "".join(sentences[:at]), "".join(sentences[at:])
        between = " " if after and not after[0].isspace() else ""
        text = f"{before} {sentence.sentence}{between}{after}"
        return Question(f"{text}\n\n{sentence.question}", list(sentence.expected))

    candidates = anywhere(running, keyed_random("needle", subject.seed, index, length, depth, sentence.sentence))
    return filled("needle", length, running, candidates, hide, lambda asked: len(tokens_of(subject, asked, chat)) + new)


def tokens_in(subject: Subject, pieces: Sequence[Piece], chat: Chat | None) -> int:
    """Counts the tokens of the pieces' text, rendered with the chat template if there is one."""
    asked = pieces if chat is None else chat.pieces(pieces)
    text = "".join(piece.text for piece in asked)
    return len(subject.tokenizer(text, add_special_tokens=chat is None)["input_ids"])


def holds_all(text: str, expected: Sequence[str]) -> bool:
    """Whether `text` contains all expected texts, ignoring case."""
    return all(part.casefold() in text.casefold() for part in expected)


def sentence_of(given: Mapping[str, Any]) -> Sentence:
    """Returns a user's own needle; raises UsageError if an entry is missing or not a text."""
    names = [field.name for field in fields(Sentence)]
    for name in given:
        if name not in names:
            raise UsageError(
                unknown(f"tasks.needle.needle.{name}", [f"tasks.needle.needle.{known}" for known in names])
            )
    for name in ("sentence", "question"):
        if not is_text(given.get(name)):
            raise UsageError(f"invalid value {printable(given.get(name))} for 'tasks.needle.needle.{name}' (a text)")
    expected = [given.get("expected")] if isinstance(given.get("expected"), str) else given.get("expected")
    if not isinstance(expected, list | tuple) or not expected or not all(map(is_text, expected)):
        raise UsageError(
            f"invalid value {printable(expected)} for 'tasks.needle.needle.expected' (a list of texts that an answer holds)"
        )
    return Sentence(given["sentence"].strip(), given["question"].strip(), tuple(expected))


def is_text(value: object) -> bool:
    """Whether `value` is a non-blank string."""
    return isinstance(value, str) and bool(value.strip())
