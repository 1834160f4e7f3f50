"""GSM8K (arXiv:2110.14168): grade-school mathematics, answered with reasoning, from local files.

    {"question": "...", "answer": "...reasoning...\\n#### 18"}     a line of the published test.jsonl

A prompt is the few-shot prompt, an empty line and the question in the format `form`. The last number of the generated text is
compared with the one after `####`; generation ends when the model begins another question (`stop`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from calib.errors import UsageError
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.generated import GeneratedColumn, Question
from calib.evaluate.tasks.json_lines import JsonLines, check_file
from calib.runtime.messages.printable import printable

WHAT = "GSM8K's test.jsonl (question, answer with a number behind ####), one JSON object a line"
PROMPT = "a text with worked examples in UTF-8"
PLACEHOLDER = "{question}"
MARK = "####"
# Matches 1,234.5 and -3; the hyphen in 10-3 is not a sign.
NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


@dataclass(frozen=True)
class GSM8K:
    """A task with one column.

    Args:
        file: GSM8K's JSON lines.
        prompt_file: file with worked examples that are put before every question; None: no examples.
        form: format of a question, in which `{question}` is its text; it should match the examples of `prompt_file`.
        stop: texts that end an answer.
        cases: number of cases, from the beginning of the file; None for all.
        new_tokens: most new tokens of an answer.
        chat_template: use the tokenizer's chat template, with examples and question in one user's turn.
        longest: most tokens of a prompt; None: as many as the model's positions leave. Longer prompts lose their middle.
        title: the column's title.
    """

    file: str = ""
    prompt_file: str | None = None
    form: str = "Question: {question}\n"
    stop: tuple[str, ...] = ("\nQuestion:", "\nQ:")
    cases: int | None = 100
    new_tokens: int = 256
    chat_template: bool = False
    longest: int | None = None
    title: str = "gsm8k"

    def __post_init__(self) -> None:
        for option, least in (("cases", 1), ("new_tokens", 1), ("longest", 2)):
            if getattr(self, option) is not None or option == "new_tokens":
                whole_number("gsm8k", option, getattr(self, option), least)
        if not isinstance(self.form, str) or PLACEHOLDER not in self.form:
            raise UsageError(
                f"invalid value {printable(self.form)} for 'tasks.gsm8k.form' (a text with {PLACEHOLDER} in it)"
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"invalid value {printable(self.stop)} for 'tasks.gsm8k.stop' (a list of texts)")
        object.__setattr__(self, "stop", tuple(stop))
        check_chat("gsm8k", self.chat_template)
        check_title("gsm8k", self.title)
        check_file("gsm8k", "file", self.file, WHAT)
        for _ in self.questions(self.cases):  # checks every line before the model is loaded
            pass

    def titles(self) -> list[str]:
        """Returns the title of its only column, by default "gsm8k"."""
        return [self.title]

    def examples(self) -> str:
        """Returns the few-shot prompt followed by an empty line, or "" if there is none."""
        if self.prompt_file is None:
            return ""
        path = check_file("gsm8k", "prompt_file", self.prompt_file, PROMPT)
        try:
            return path.read_text(encoding="utf-8").rstrip() + "\n\n"
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"tasks.gsm8k.prompt_file: {printable(str(path))} cannot be read ({printable(str(error))}), expected {PROMPT}"
            ) from error

    def questions(self, count: int | None) -> Iterator[Question]:
        """Yields the first `count` questions of the file; raises UsageError with the number of the first invalid line."""
        examples, lines = self.examples(), JsonLines("gsm8k", Path(self.file), WHAT)
        for number, content in lines.read(count):
            question, answer = (lines.field(number, content, name, str) for name in ("question", "answer"))
            found = NUMBER.findall(answer.rpartition(MARK)[2]) if MARK in answer else []
            if not found:
                raise lines.wrong(number, f"has no number behind {MARK} in its answer")
            yield Question(examples + self.form.replace(PLACEHOLDER, question), found[0])

    def columns(self, subject: Subject) -> list[Column]:
        """Reads and tokenises the cases; raises UsageError if `chat_template` is set and the tokenizer has none."""
        chat = Chat(subject.tokenizer, "gsm8k") if self.chat_template else None
        questions = list(self.questions(subject.limit if self.cases is None else subject.rows(self.cases)))
        prompt_file = None if self.prompt_file is None else Path(self.prompt_file).name
        settings = {"file": Path(self.file).name, "prompt_file": prompt_file, "stop": list(self.stop)}
        return [
            GeneratedColumn(
                subject,
                "gsm8k",
                self.title,
                settings,
                questions,
                last_number_is,
                self.new_tokens,
                self.stop,
                chat,
                self.longest,
            )
        ]


def last_number_is(text: str, expected: str) -> bool:
    """Whether the last number in `text` is the expected one; 1,000 is 1000 and 18.00 is 18."""
    found = NUMBER.findall(text)
    return bool(found) and value(found[-1]) == value(expected)


def value(number: str) -> Decimal:
    """Parses a number with optional commas."""
    return Decimal(number.replace(",", ""))
