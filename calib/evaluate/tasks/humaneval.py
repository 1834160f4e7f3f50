"""HumanEval (Chen et al., arXiv:2107.03374): the model completes functions from their docstrings, and their tests are run.

    {"prompt": "def f(x): ...docstring", "entry_point": "f", "test": "def check(candidate): assert ...", ...}

This is a line of the published HumanEval.jsonl, which may be gzipped. The prompt is completed greedily up to the first of the
paper's stop texts; pass@1 is the share of completions that pass their tests. The completions are executed
(`calib/evaluate/checked_program.py`), which needs the option `run_code: true`.

With a chat template the prompt is shown in the user's turn, and the answer already begins with it, so that the model continues it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from calib.errors import UsageError
from calib.evaluate.checked_program import ends_well
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.generated import GeneratedColumn, Question
from calib.evaluate.tasks.json_lines import JsonLines, check_file
from calib.runtime.messages.printable import printable

WHAT = "HumanEval.jsonl or HumanEval.jsonl.gz (prompt, entry_point, test), one JSON object a line"
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # the paper's stop texts
FENCE = "```"
REQUEST = "Complete this function. Answer with the code alone.\n\n" + FENCE + "python\n{prompt}\n" + FENCE
LONGEST = 3600  # seconds


class Problem(NamedTuple):
    """A problem: the prompt that is completed, its tests, and the function's name."""

    prompt: str
    test: str
    entry_point: str

    def program(self, completion: str) -> str:
        """Returns the program: the completed function, the tests, and the call of the tests."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})"


@dataclass(frozen=True)
class HumanEval:
    """A task with one column.

    Args:
        file: HumanEval's JSON lines, gzipped if the name ends with `.gz`.
        run_code: must be true: the code that the model wrote is run on this machine, with the user's rights.
        seconds: wall time for each completion's tests, the interpreter's start included.
        cases: number of problems, from the beginning of the file; None for all.
        new_tokens: most new tokens of a completion.
        chat_template: use the tokenizer's chat template.
        longest: most tokens of a prompt; None: as many as the model's positions leave. Longer prompts lose their middle.
        title: the column's title.
    """

    file: str = ""
    run_code: bool = False
    seconds: float = 3.0
    cases: int | None = None
    new_tokens: int = 512
    chat_template: bool = False
    longest: int | None = None
    title: str = "humaneval"

    def __post_init__(self) -> None:
        for option, least in (("cases", 1), ("new_tokens", 1), ("longest", 2)):
            if getattr(self, option) is not None or option == "new_tokens":
                whole_number("humaneval", option, getattr(self, option), least)
        if type(self.seconds) not in (int, float) or not 0 < self.seconds <= LONGEST:
            raise UsageError(
                f"invalid value {printable(self.seconds)} for 'tasks.humaneval.seconds' "
                f"(a number above 0, at most {LONGEST})"
            )
        if not isinstance(self.run_code, bool):
            raise UsageError(f"'tasks.humaneval.run_code' must be true or false, got {printable(self.run_code)}")
        check_chat("humaneval", self.chat_template)
        check_title("humaneval", self.title)
        check_file("humaneval", "file", self.file, WHAT)
        if not self.run_code:
            raise UsageError(
                "tasks.humaneval runs the code that the model writes, on this machine, with your rights and in no sandbox; "
                "give run_code: true where this is acceptable, such as in a container without network"
            )
        for _ in self.questions(self.cases, chat=False):  # checks every line before the model is loaded
            pass

    def titles(self) -> list[str]:
        """Returns the title of its only column, by default "humaneval"."""
        return [self.title]

    def questions(self, count: int | None, chat: bool) -> Iterator[Question]:
        """Yields the first `count` problems of the file; raises UsageError with the number of the first invalid line."""
        lines = JsonLines("humaneval", Path(self.file), WHAT)
        for number, content in lines.read(count):
            problem = Problem(*(lines.field(number, content, name, str) for name in Problem._fields))
            if not problem.entry_point.isidentifier():
                raise lines.wrong(number, f"has {printable(problem.entry_point)} for 'entry_point', a name is needed")
            if chat:
                asked = REQUEST.replace("{prompt}", problem.prompt.strip())
                yield Question(asked, problem, begun=f"{FENCE}python\n{problem.prompt}")
            else:
                yield Question(problem.prompt, problem)

    def columns(self, subject: Subject) -> list[Column]:
        """Reads and tokenises the problems; raises UsageError if `chat_template` is set and the tokenizer has none."""
        chat = Chat(subject.tokenizer, "humaneval") if self.chat_template else None
        count = subject.limit if self.cases is None else subject.rows(self.cases)
        stop = STOP if chat is None else (*STOP, f"\n{FENCE}")
        return [
            GeneratedColumn(
                subject,
                "humaneval",
                self.title,
                {"file": Path(self.file).name, "stop": list(stop), "seconds": self.seconds},
                list(self.questions(count, self.chat_template)),
                partial(passes, seconds=self.seconds),
                self.new_tokens,
                stop,
                chat,
                self.longest,
                measure_name="pass@1",
            )
        ]


def passes(completion: str, problem: Problem, seconds: float) -> bool:
    """Runs the completed function's tests, and returns whether they pass within `seconds`."""
    return ends_well(problem.program(completion), seconds)
