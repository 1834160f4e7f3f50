"""Questions that a model answers in its own words: text is generated greedily through the cache, and an answer is read from it.

A prompt that is too long loses its middle, as in LongBench (arXiv:2308.14508): the first and the last half of the tokens that
have room stay, so that a template's beginning and its generation prompt do as well.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from calib.errors import UsageError
from calib.evaluate.generation import Prompt, behind, generated
from calib.evaluate.proportion import Proportion, exact_at
from calib.evaluate.tasks.chat import Chat
from calib.evaluate.tasks.contract import Subject

# The most likely token each time, whatever the model's own generation settings say.
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


class Question(NamedTuple):
    """A prompt and what its answer is compared with.

    Attributes:
        prompt: the user's turn where there is a chat.
        answer: what `GeneratedColumn.right` is given, plain JSON.
        chance: the share that guessing one of the prompt's items has right.
        begun: how the answer begins; the model goes on behind it.
    """

    prompt: str
    answer: Any
    chance: float = 0.0
    begun: str = ""


class GeneratedBatch(NamedTuple):
    """Prompts that go through a cache together, and their answers."""

    prompts: list[Prompt]
    answers: list[Any]


class GeneratedColumn:
    """Questions that are answered one by one, such as those of a file.

    Args:
        subject: what is evaluated.
        task: the task's name.
        title: the column's.
        settings: what the questions depend on besides what is given here.
        questions: one a row.
        right: whether a generated text is right: `right(text, answer)`.
        new: tokens of an answer at most.
        stop: texts that end an answer.
        chat: what the questions are asked with; None: as they stand.
        longest: tokens of a prompt at most; None: as many as the model has room for before the answer.
        parts: for each question the part that its figure belongs to, such as "depth 0.25"; none: no such figures.
        measure_name: what the share of right answers is called.

    Attributes:
        cut: prompts that have lost their middle.
        chance: the share of exact answers that guessing has, mean over the rows.

    Raises:
        UsageError: no room for a prompt before the answer in the length that the model was made for.
    """

    reads_pages = False

    def __init__(
        self,
        subject: Subject,
        task: str,
        title: str,
        settings: dict[str, Any],
        questions: Sequence[Question],
        right: Callable[[str, Any], bool],
        new: int,
        stop: Sequence[str],
        chat: Chat | None,
        longest: int | None,
        parts: Sequence[str] = (),
        measure_name: str = "exact answers",
    ) -> None:
        self.title, self.subject, self.right, self.measure_name = title, subject, right, measure_name
        room = room_for(subject, task, new, longest)
        rows = [tokens_of(subject, question, chat) for question in questions]
        self.cut = sum(room is not None and len(row) > room for row in rows)
        rows = [row if room is None else without_middle(row, room) for row in rows]
        self.rows = len(rows)
        self.prompt = sum(map(len, rows)) / self.rows
        self.length = self.prompt + new - 1  # the last token is not fed; a row that ends by itself has fewer
        self.longest_row = max(map(len, rows)) + new - 1
        self.chance = sum(question.chance for question in questions) / self.rows
        end = subject.tokenizer.eos_token
        until = [*stop, *([str(end)] if end else [])]
        order = sorted(range(self.rows), key=lambda position: len(rows[position]))  # little padding; a stable order
        prompts = [Prompt(rows[position], new, until, dict(GREEDY)) for position in order]
        answers, size = [questions[position].answer for position in order], subject.batch_size
        self.parts = [parts[position : position + 1] for position in order]  # none where there are no parts
        self._batches = [
            GeneratedBatch(prompts[at : at + size], answers[at : at + size]) for at in range(0, self.rows, size)
        ]
        asked = json.dumps([question[:2] for question in questions])
        self.settings: dict[str, Any] = {
            "task": task,
            **settings,
            "sha256": hashlib.sha256(asked.encode()).hexdigest(),
            "cases": self.rows,
            "new_tokens": new,
            **({} if longest is None else {"longest": longest}),
            "cut_prompts": self.cut,
            **({} if chat is None else {"chat_template": chat.identity}),
        }

    def batches(self) -> list[GeneratedBatch]:
        """The questions, shortest prompts first."""
        return self._batches

    def measure(self, cache: Cache, batch: GeneratedBatch) -> Tensor:
        """[rows] bool: whether the text that was generated is right."""
        texts = generated(self.subject.model, self.subject.tokenizer, cache, batch.prompts, behind)
        return torch.tensor([self.right(text, answer) for text, answer in zip(texts, batch.answers, strict=True)])

    def summary(self, parts: Sequence[Tensor]) -> dict[str, float | int]:
        """Share of right answers with its 95 % interval (Wilson), and the parts' shares."""
        right = torch.cat(list(parts))
        return {**Proportion(int(right.sum()), self.rows).as_dict(), **exact_at(self.parts, right[:, None].tolist())}

    def words(self, figures: dict[str, float | int]) -> str:
        """ "0.940 [0.838, 0.979]"."""
        return "{exact:.3f} [{low:.3f}, {high:.3f}]".format(**figures)

    def brief(self, figures: dict[str, float | int]) -> str:
        """ "0.940"."""
        return "{exact:.3f}".format(**figures)


def tokens_of(subject: Subject, question: Question, chat: Chat | None) -> list[int]:
    """Ids of all that stands before the generated text: the user's turn and the generation prompt with a chat, else the
    prompt behind the tokenizer's own special tokens; then the answer's beginning."""
    asked = question.prompt if chat is None else chat.opened([{"role": "user", "content": question.prompt}])
    return list(subject.tokenizer(asked + question.begun, add_special_tokens=chat is None)["input_ids"])


def room_for(subject: Subject, task: str, new: int, longest: int | None) -> int | None:
    """Tokens of a prompt at most; None where nothing limits them. Raises UsageError where none are left."""
    config = subject.model.config.get_text_config(decoder=True)
    made_for = getattr(config, "max_position_embeddings", None)
    if made_for is None:
        return longest
    if new >= made_for:
        raise UsageError(
            f"invalid value {new} for 'tasks.{task}.new_tokens': this model was made for {made_for} tokens, prompt included; "
            f"give less than {made_for}"
        )
    room = int(made_for) - new
    return room if longest is None else min(room, longest)


def without_middle(row: list[int], room: int) -> list[int]:
    """The first and the last half of `room` tokens; the row itself where it has no more."""
    if len(row) <= room:
        return row
    first = room // 2
    return row[:first] + row[len(row) - (room - first) :]
