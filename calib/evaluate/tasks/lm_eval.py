"""Runs tasks of lm-eval (EleutherAI's Language Model Evaluation Harness) by name with the cache.

Each name is a column. Its requests are collected once and turned into rows of tokens; the answers with a method's cache are passed
back to lm-eval, whose own metrics are the figures. `calib/evaluate/lm_eval/answers.py` describes how rows are fed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from calib.errors import RunError, UsageError
from calib.evaluate.figures import interval, number, scalars, spoken
from calib.evaluate.generation import Prompt
from calib.evaluate.lm_eval.answers import Answer, answered
from calib.evaluate.lm_eval.metrics import figures
from calib.evaluate.lm_eval.rows import Batch, Row, in_batches, length_of
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.runtime.messages.printable import printable

if TYPE_CHECKING:
    from calib.evaluate.lm_eval.named_task import NamedTask

MISSING = "tasks.lm_eval needs the package lm-eval: pip install 'calib-kv[lm-eval]'"


@dataclass(frozen=True)
class LmEval:
    """A task with one column for each name.

    Args:
        names: names of lm-eval's tasks, or of groups with an aggregate metric (`arc_easy`, `mmlu`).
        few_shot: examples in a prompt; None: the task's own number. Tasks whose own number is 0 never get examples.
        cases: number of documents (of each task of a group); None for all.
        chunk: tokens of a continuation in one forward.
        max_gen_toks: most new tokens of a generation if the task gives no limit.
        include_path: a folder with YAML files of tasks, or a list of folders.
        title: text before the name in a column's title.
        chat_template: lm-eval's `apply_chat_template`: each prompt, with its examples, is one user's turn of the tokenizer's chat
            template.
    """

    names: tuple[str, ...] = ()
    few_shot: int | None = None
    cases: int | None = 100
    chunk: int = 16
    max_gen_toks: int = 256
    include_path: str | Sequence[str] | None = None
    title: str | None = None
    chat_template: bool = False

    def __post_init__(self) -> None:
        names = [self.names] if isinstance(self.names, str) else self.names
        if (
            not isinstance(names, list | tuple)
            or not names
            or not all(name and isinstance(name, str) for name in names)
        ):
            raise UsageError(
                f"invalid value {printable(self.names)} for 'tasks.lm_eval.names' (a name, or a list of names)"
            )
        object.__setattr__(self, "names", tuple(names))
        for option, least in (("few_shot", 0), ("cases", 1), ("chunk", 1), ("max_gen_toks", 1)):
            if getattr(self, option) is not None or option in ("chunk", "max_gen_toks"):
                whole_number("lm_eval", option, getattr(self, option), least)
        folders = self.include_path if isinstance(self.include_path, list | tuple) else [self.include_path or "."]
        if not all(isinstance(folder, str) for folder in folders):
            raise UsageError(
                f"'tasks.lm_eval.include_path' must be a folder, a list or null, got {printable(self.include_path)}"
            )
        if self.title is not None:
            check_title("lm_eval", self.title)
        check_chat("lm_eval", self.chat_template)
        if find_spec("lm_eval") is None:
            raise UsageError(MISSING)

    def titles(self) -> list[str]:
        """Returns the names, each after the title if there is one."""
        return [name if self.title is None else f"{self.title} {name}" for name in self.names]

    def columns(self, subject: Subject) -> list[Column]:
        """Loads the tasks and collects their requests; raises UsageError for unknown names and unavailable data."""
        from calib.evaluate.lm_eval.named_task import NamedTask, known_tasks  # slow import, needed for this task only

        manager = known_tasks(self.include_path, self.names)
        cases = subject.limit if self.cases is None else subject.rows(self.cases)
        chat, writer = None, None
        if self.chat_template:
            from calib.evaluate.lm_eval.replay import Recorder

            chat = Chat(subject.tokenizer, "lm_eval")
            writer = Recorder(subject.tokenizer, length_of(subject.model.config, subject.tokenizer), self.max_gen_toks)
        return [
            LmEvalColumn(
                self, title, NamedTask(manager, name, self.few_shot, cases, subject.seed, writer), subject, chat
            )
            for title, name in zip(self.titles(), self.names, strict=True)
        ]


@dataclass(frozen=True)
class Part:
    """The answers to a batch, and the indices of its rows among all rows."""

    positions: list[int]
    answers: list[Answer]


class LmEvalColumn:
    """The requests of one task as rows; a request that is scored in windows is several rows."""

    reads_pages = False

    def __init__(
        self, task: LmEval, title: str, named: "NamedTask", subject: Subject, chat: Chat | None = None
    ) -> None:
        from calib.evaluate.lm_eval.replay import Recorder

        self.title, self.task, self.named, self.subject = title, task, named, subject
        self.longest = length_of(subject.model.config, subject.tokenizer)
        recorder = Recorder(subject.tokenizer, self.longest, task.max_gen_toks)
        for kind, requests in named.requests().items():
            getattr(recorder, kind)(requests, disable_tqdm=True)
        self.asked: list[Row] = recorder.rows
        self._batches = in_batches(self.asked, subject.batch_size, task.chunk, self.longest)
        self.rows = len(self.asked)
        self.prompt = sum(sum(batch.prefill(task.chunk)) for batch in self._batches) / self.rows
        self.length = sum(sum(batch.lengths()) for batch in self._batches) / self.rows
        self.longest_row = max(max(batch.lengths()) for batch in self._batches)
        self.chunk = 1 if any(isinstance(row, Prompt) for row in self.asked) else task.chunk
        self.measure_name = ", ".join(
            map(spoken, scalars([dict.fromkeys(named.metrics, 0.0)]))
        )  # as `brief` orders them
        settings: dict[str, Any] = {"task": "lm_eval", **named.settings, "chunk": task.chunk}
        if any(isinstance(row, Prompt) for row in self.asked):
            settings["max_gen_toks"] = task.max_gen_toks
        self.settings = settings if chat is None else {**settings, "chat_template": chat.identity}

    def batches(self) -> list[Batch]:
        """Returns the batches of rows."""
        return self._batches

    def measure(self, cache: Cache, batch: Batch) -> Part:
        """Returns the answers to a batch; sampled answers depend on the seed only."""
        model, tokenizer = self.subject.model, self.subject.tokenizer
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(self.subject.seed)
            return Part(batch.positions, answered(model, tokenizer, cache, batch, self.task.chunk))

    def summary(self, parts: Sequence[Part]) -> dict[str, float | int]:
        """Returns lm-eval's metrics of the answers, with 95 % intervals from its standard errors, and the number of requests."""
        from calib.evaluate.lm_eval.replay import Replay

        found = {
            position: answer for part in parts for position, answer in zip(part.positions, part.answers, strict=True)
        }
        pairs = [(row, found[position]) for position, row in enumerate(self.asked)]
        replay = Replay(self.subject.tokenizer, self.longest, self.task.max_gen_toks, pairs)
        results = self.named.results(replay)
        if replay.left:
            raise RunError(f"lm-eval's '{self.named.name}' did not ask for {replay.left} of the answers")
        return {**figures(results), "requests": self.rows}

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns "accuracy 0.650 [0.556, 0.744], accuracy norm 0.660 [0.567, 0.753]"."""
        return ", ".join(f"{spoken(name)} {told(figures, name)}" for name in scalars([figures]))

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns "0.650 0.660"."""
        return " ".join(number(figures[name]) for name in scalars([figures]))


def told(figures: dict[str, float | int], name: str) -> str:
    """Returns "0.650 [0.556, 0.744]", without brackets if there is no interval."""
    ends = interval(figures, name)
    return number(figures[name]) + ("" if ends is None else f" [{number(ends[0])}, {number(ends[1])}]")
