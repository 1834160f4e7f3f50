"""LongEval: retrieve lines or topics from a long prompt, with the published files (github.com/DachengLi1/LongChat, longeval).

    lines     {"prompt": ..., "expected_number": 4821, "num_lines": 200}     asks for the number in a keyed line
    topics    {"prompt": ..., "topics": ["...", ...]}                        asks for the first topic of a conversation

Answers are scored as by LongEval's own code: for lines the last number in the generated text must be the expected one, for topics
the text must contain the first topic's name, ignoring case.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from calib.errors import UsageError
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.generated import GeneratedColumn, Question
from calib.evaluate.tasks.json_lines import JsonLines, check_file
from calib.runtime.messages.printable import printable

Which = Literal["last", "first"]
WHAT = "LongEval's lines (prompt, expected_number) or topics (prompt, topics), one JSON object a line"
NUMBER = re.compile(r"[0-9]+")
NEW_TOKENS = {"lines": 100, "topics": 50}  # as in LongEval's code


@dataclass(frozen=True)
class LongEval:
    """A task with one column: the cases of a file.

    Args:
        file: LongEval's JSON lines, of lines or of topics.
        cases: number of cases, from the beginning of the file; None for all.
        new_tokens: most new tokens of an answer; None: LongEval's 100 for lines, 50 for topics.
        number: which number of an answer counts for lines: `last`, as in LongEval's code, or `first`, for models that go on
            generating after their answer.
        chat_template: use the tokenizer's chat template, as LongEval does.
        longest: most tokens of a prompt; None: as many as the model's positions leave. Longer prompts lose their middle.
        title: the column's title; None: the file's name without its ending.
    """

    file: str = ""
    cases: int | None = 50
    new_tokens: int | None = None
    number: Which = "last"
    chat_template: bool = False
    longest: int | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        for option, least in (("cases", 1), ("new_tokens", 1), ("longest", 2)):
            if getattr(self, option) is not None:
                whole_number("longeval", option, getattr(self, option), least)
        if self.number not in get_args(Which):
            choices = ", ".join(get_args(Which))
            raise UsageError(f"invalid value {printable(self.number)} for 'tasks.longeval.number' (one of {choices})")
        check_chat("longeval", self.chat_template)
        check_file("longeval", "file", self.file, WHAT)
        check_title("longeval", self.titles()[0])
        for _ in self.questions(self.cases):  # checks every line before the model is loaded
            pass

    def titles(self) -> list[str]:
        """Returns the title of its only column, such as "200_lines"."""
        return [Path(self.file).stem if self.title is None else self.title]

    def kind(self) -> str:
        """Returns `lines` or `topics`, from the file's first case. Raises UsageError if it is neither."""
        lines = self._lines()
        number, content = next(lines.read(1))
        if "expected_number" not in content and "topics" not in content:
            raise lines.wrong(number, "has neither 'expected_number' nor 'topics'")
        return "lines" if "expected_number" in content else "topics"

    def questions(self, count: int | None) -> Iterator[Question]:
        """Yields the first `count` cases of the file; raises UsageError with the number of the first invalid line."""
        kind, lines = self.kind(), self._lines()
        for number, content in lines.read(count):
            prompt = lines.field(number, content, "prompt", str)
            if kind == "lines":
                expected = lines.field(number, content, "expected_number", int)
                if expected < 0:
                    raise lines.wrong(number, f"has {printable(expected)} for 'expected_number', at least 0 is needed")
                count_of_lines = content.get("num_lines")
                known = type(count_of_lines) is int and count_of_lines > 0
                yield Question(prompt, str(expected), 1 / count_of_lines if known else 0.0)
            else:
                topics = lines.field(number, content, "topics", list)
                if not all(isinstance(topic, str) and topic.strip() for topic in topics):
                    raise lines.wrong(number, f"has {printable(topics)} for 'topics', a list of texts is needed")
                yield Question(prompt, topics[0].strip(), 1 / len(topics))

    def columns(self, subject: Subject) -> list[Column]:
        """Reads and tokenises the cases; raises UsageError if `chat_template` is set and the tokenizer has none."""
        chat = Chat(subject.tokenizer, "longeval") if self.chat_template else None
        kind = self.kind()
        questions = list(self.questions(subject.limit if self.cases is None else subject.rows(self.cases)))
        settings = {"file": Path(self.file).name, "kind": kind}
        if kind == "lines":
            settings["number"] = self.number
        new = NEW_TOKENS[kind] if self.new_tokens is None else self.new_tokens
        right = (last_number if self.number == "last" else first_number) if kind == "lines" else names_it
        title = self.titles()[0]
        return [GeneratedColumn(subject, "longeval", title, settings, questions, right, new, (), chat, self.longest)]

    def _lines(self) -> JsonLines:
        return JsonLines("longeval", Path(self.file), WHAT)


def last_number(text: str, expected: str) -> bool:
    """Whether the last number in `text` is the `expected` one."""
    return same_number(NUMBER.findall(text)[-1:], expected)


def first_number(text: str, expected: str) -> bool:
    """Whether the first number in `text` is the `expected` one."""
    return same_number(NUMBER.findall(text)[:1], expected)


def same_number(found: list[str], expected: str) -> bool:
    """Whether `found` has one number that equals the expected one, ignoring leading zeros."""
    return [number.lstrip("0") for number in found] == [expected.lstrip("0")]


def names_it(text: str, topic: str) -> bool:
    """Whether `text` contains the topic's name, ignoring case."""
    return topic.casefold() in text.casefold()
