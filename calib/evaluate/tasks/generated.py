"""Questions that a model answers by generation: text is generated greedily with the cache, and the answer is extracted from it.

A prompt that is too long loses its middle, as in LongBench (arXiv:2308.14508): half of the available tokens are taken from its
beginning and half from its end, so that a chat template's beginning and its generation prompt are kept.
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

# Greedy decoding, regardless of the model's own generation settings.
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
    """A prompt and the expected answer.

    Attributes:
        prompt: the prompt's text; with a chat template, the user's turn.
        answer: what the generated text is compared with, plain JSON; the second argument of `GeneratedColumn.right`.
        chance: the probability that guessing one of the prompt's items is right.
        begun: given beginning of the answer, which the model continues.
    """

    prompt: str
    answer: Any
    chance: float = 0.0
    begun: str = ""


class GeneratedBatch(NamedTuple):
    """Prompts of one batch, and their expected answers."""

    prompts: list[Prompt]
    answers: list[Any]


class GeneratedColumn:
    """A column of independent questions with generated answers.

    Args:
        subject: the evaluated model, tokenizer and settings.
        task: the task's name.
        title: the column's title.
        settings: further settings that the questions depend on.
        questions: the questions, one for each row.
        right: `right(text, answer)` says whether a generated text is right.
        new: most new tokens of an answer.
        stop: texts that end an answer.
        chat: the chat template that renders the prompts; None: prompts are used unchanged.
        longest: most tokens of a prompt; None: as many as the model's positions leave before the answer.
        parts: for each question, the part that it counts for, such as "depth 0.25"; empty: no figures by part.
        measure_name: name of the share of right answers.

    Attributes:
        cut: number of prompts that have lost their middle.
        chance: the share of exact answers that guessing gives, mean over the rows.

    Raises:
        UsageError: if the model's positions leave no room for a prompt before the answer.
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
        self.length = self.prompt + new - 1  # the last token is not fed; rows that end early have fewer
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
        """Returns the questions in batches, shortest prompts first."""
        return self._batches

    def measure(self, cache: Cache, batch: GeneratedBatch) -> Tensor:
        """Generates the answers; returns [rows] bool: whether each generated text is right."""
        texts = generated(self.subject.model, self.subject.tokenizer, cache, batch.prompts, behind)
        return torch.tensor([self.right(text, answer) for text, answer in zip(texts, batch.answers, strict=True)])

    def summary(self, parts: Sequence[Tensor]) -> dict[str, float | int]:
        """Returns the share of right answers with its 95 % interval (Wilson), and the share of each part."""
        right = torch.cat(list(parts))
        return {**Proportion(int(right.sum()), self.rows).as_dict(), **exact_at(self.parts, right[:, None].tolist())}

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns "0.940 [0.838, 0.979]"."""
        return "{exact:.3f} [{low:.3f}, {high:.3f}]".format(**figures)

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns "0.940"."""
        return "{exact:.3f}".format(**figures)


def tokens_of(subject: Subject, question: Question, chat: Chat | None) -> list[int]:
    """Returns the ids of the whole text before the generated one: with a chat template the user's turn and the generation prompt,
    else the tokenizer's special tokens and the prompt; then the given beginning of the answer."""
    asked = question.prompt if chat is None else chat.opened([{"role": "user", "content": question.prompt}])
    return list(subject.tokenizer(asked + question.begun, add_special_tokens=chat is None)["input_ids"])


def room_for(subject: Subject, task: str, new: int, longest: int | None) -> int | None:
    """Returns the most tokens of a prompt, or None if nothing limits them. Raises UsageError if no tokens are left for it."""
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
    """Cuts a row to `room` tokens by removing its middle; a row with no more tokens is returned as it is."""
    if len(row) <= room:
        return row
    first = room // 2
    return row[:first] + row[len(row) - (room - first) :]
