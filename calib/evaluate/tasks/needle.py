"""A needle in a haystack: one sentence, hidden in running text at a depth, and asked for at its end.

    numbers         ... was built in 1906. The number of rain is 4821. The church ... / ? /  The number of rain is       -> 4821
    san_francisco   the sentence of the first such test (github.com/gkamradt/LLMTest_NeedleInAHaystack), or one of your own

Depth 0 is before the first sentence, 1 after the last. With `numbers` every case has a position of the text, a word and a number
of its own (`calib.documents.generators.needles`, evaluation split), and is scored like line retrieval. Another sentence is the
same in every case; the model answers in its own words, and is right where the expected ones are all in its answer. A column's
figures are the share of right answers over all depths and at each of them, so that columns of several lengths are a grid of
depth by length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from calib.config_messages import unknown
from calib.documents.corpus import TextSource
from calib.documents.generators import Piece, keyed_random, needles
from calib.documents.running_text import RunningText
from calib.errors import UsageError
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.generated import GeneratedColumn, Question, tokens_of
from calib.evaluate.tasks.haystack import anywhere, case_depths, check_grid, check_lengths, filled, running_text
from calib.evaluate.tasks.retrieval import AnswersColumn
from calib.evaluate.tasks.text import Text, read_text, sampled, text_source
from calib.runtime.messages.printable import printable

SAMPLED_SEQUENCES, SAMPLED_TOKENS = 32, 128  # of text, where it is sampled; a longer haystack goes around
NUMBERS = "numbers"


@dataclass(frozen=True)
class Sentence:
    """A needle in words.

    Attributes:
        sentence: what is hidden.
        question: what stands behind the text.
        expected: texts that a right answer holds, in whatever case.
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
    """One column a length.

    Args:
        lengths: tokens of a row, question and answer included, at most; what a whole sentence would exceed is left out.
        depths: of the needle, by sentences.
        cases: independent cases at each depth.
        needle: `numbers`, `san_francisco`, or one of your own as {sentence:, question:, expected: [texts of its answer]}.
        digits: of `numbers`.
        new_tokens: of an answer in words at most.
        text: what it is hidden in: a UTF-8 file, a list of them, a data set of the hub as {name:, config:, split:, column:},
            or None: text sampled from the model itself at temperature 1, which needs no network.
        natural_spacing: take WikiText's tokenised spacing (` @-@ `, ` ,`) back to written English.
        title: what stands before the length in a column's title.
        chat_template: ask in the words of the tokenizer's chat template, whose tokens count as well: text and question are the
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
        """Where the text comes from; None when it is sampled."""
        return text_source("needle", self.text, self.natural_spacing)

    def sentence(self) -> Sentence | None:
        """The needle in words; None for numbers. Raises UsageError for what it cannot be."""
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
        """ "needle 512", "needle 1024", ..."""
        return [f"{self.title} {length}" for length in self.lengths]

    def columns(self, subject: Subject) -> list[Column]:
        """Reads or samples the text and hides the needles; refuses lengths that the model, or a needle, does not allow."""
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
    """Words with their numbers, hidden in rows of one length."""

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
    """One sentence, hidden in rows of one length."""

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
    """Case `index` at `depth`: a word's number, within `length` tokens with its answer and the chat's words."""
    key = ("needle", subject.seed, index, length, depth, digits)

    def hide(sentences: Sequence[str]) -> Sequence[Piece]:
        # The generator draws the same whatever sentences it is given.
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
    """Case `index` at `depth`: the sentence, within `length` tokens with `new` ones of an answer and the chat's words."""

    def hide(sentences: Sequence[str]) -> Question:
        at = round(depth * len(sentences))
        before, after = "".join(sentences[:at]), "".join(sentences[at:])
        between = " " if after and not after[0].isspace() else ""
        text = f"{before} {sentence.sentence}{between}{after}"
        return Question(f"{text}\n\n{sentence.question}", list(sentence.expected))

    candidates = anywhere(running, keyed_random("needle", subject.seed, index, length, depth, sentence.sentence))
    return filled("needle", length, running, candidates, hide, lambda asked: len(tokens_of(subject, asked, chat)) + new)


def tokens_in(subject: Subject, pieces: Sequence[Piece], chat: Chat | None) -> int:
    """Tokens of the pieces' text, of its conversation where there is a chat."""
    asked = pieces if chat is None else chat.pieces(pieces)
    text = "".join(piece.text for piece in asked)
    return len(subject.tokenizer(text, add_special_tokens=chat is None)["input_ids"])


def holds_all(text: str, expected: Sequence[str]) -> bool:
    """Whether every one of the expected texts is in `text`, in whatever case."""
    return all(part.casefold() in text.casefold() for part in expected)


def sentence_of(given: Mapping[str, Any]) -> Sentence:
    """A needle of one's own; UsageError where something of it is missing or no text."""
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
    """Whether it is a text with something in it."""
    return isinstance(value, str) and bool(value.strip())
