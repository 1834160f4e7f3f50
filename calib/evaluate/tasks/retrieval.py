"""Line retrieval: keyed lines, a question, and the number that answers it, read through the cache.

    line rain: 4821 / line milk: 1190 / ... / ? / line milk:        -> 1190

The cases are the testbed's evaluation split (`calib.testbed.splits`): fresh pairs of key and number, fresh neighbours.
The answer is scored token by token with the true tokens before each: it is exact when every token is the most likely
one, which is just when greedy generation gives it, since generation follows the true tokens up to its first mistake. The
log-probability of those tokens tells methods apart that answer equally often.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from calib.errors import UsageError
from calib.evaluate.feed import Feed
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.runtime.cache import CompressedCache
from calib.testbed.generators import POOLS, Keys, RetrievalCase, Style, retrieval_cases
from calib.testbed.proportion import Proportion


@dataclass(frozen=True)
class Retrieval:
    """One column a number of lines.

    Args:
        lines: numbers of keyed lines before the question.
        cases: independent cases a column.
        digits: of the numbers.
        style: `line` (`line rain: 4821`) or `plain` (`rain 4821`).
        keys: `words` or `numbers`.
        title: what stands behind the number of lines in a column's title.
    """

    lines: tuple[int, ...] = (20,)
    cases: int = 200
    digits: int = 4
    style: Style = "line"
    keys: Keys = "words"
    title: str = "lines"

    def __post_init__(self) -> None:
        lines = [self.lines] if type(self.lines) is int else self.lines
        if not isinstance(lines, list | tuple) or not lines:
            raise UsageError(f"invalid value {lines!r} for 'tasks.retrieval.lines' (a list of whole numbers)")
        object.__setattr__(self, "lines", tuple(lines))
        for option, values in (("lines", lines), ("cases", [self.cases]), ("digits", [self.digits])):
            for value in values:
                whole_number("retrieval", option, value, 1)
        for option, value, known in (("style", self.style, ("line", "plain")), ("keys", self.keys, tuple(POOLS))):
            if value not in known:
                choices = ", ".join(known)
                raise UsageError(f"invalid value {value!r} for 'tasks.retrieval.{option}' (one of {choices})")
        check_title("retrieval", self.title)
        try:
            for count in self.lines:
                retrieval_cases(0, 1, count, self.digits, self.style, keys=self.keys)
        except ValueError as error:
            raise UsageError(f"tasks.retrieval: {error}") from error

    def titles(self) -> list[str]:
        """ "20 lines", "40 lines", ..."""
        return [f"{count} {self.title}" for count in self.lines]

    def columns(self, subject: Subject) -> list[Column]:
        """Generates and tokenises the cases; refuses more tokens than the model was made for."""
        return [LinesColumn(self, count, subject) for count in self.lines]


class RetrievalBatch(NamedTuple):
    """Prompts [rows, tokens] int64 padded on the left, their mask, answers [rows, most] int64 and theirs (bool)."""

    prompts: Tensor
    mask: Tensor
    answers: Tensor
    asked: Tensor


class LinesColumn:
    """Cases of one number of lines."""

    measure_name = "exact answers, log p"

    def __init__(self, task: Retrieval, lines: int, subject: Subject) -> None:
        self.title, self.model = f"{lines} {task.title}", subject.model
        self.rows = subject.rows(task.cases)
        options = {key: value for key, value in asdict(task).items() if key not in ("lines", "cases", "title")}
        self.settings: dict[str, Any] = {"task": "retrieval", "lines": lines, "cases": self.rows, **options}
        cases = retrieval_cases(subject.seed, self.rows, lines, task.digits, task.style, keys=task.keys)
        pairs = [token_pair(subject.tokenizer, case) for case in cases]
        pairs.sort(key=lambda pair: len(pair[0]))  # little padding; a stable order
        self.prompt = sum(len(prompt) for prompt, _ in pairs) / len(pairs)
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        subject.check_length(longest, f"retrieval from {lines} lines", "ask for fewer lines")
        pad, size = subject.tokenizer.pad_token_id or 0, subject.batch_size
        self._batches = [batch(pairs[at : at + size], pad, self.model.device) for at in range(0, len(pairs), size)]
        fed = sum(len(part.answers) * (part.answers.shape[1] - 1) for part in self._batches)  # an answer's last is not
        self.length = self.prompt + fed / self.rows

    def batches(self) -> list[RetrievalBatch]:
        """The cases, shortest prompts first."""
        return self._batches

    def measure(self, cache: CompressedCache, batch: RetrievalBatch) -> tuple[Tensor, Tensor]:
        """Exact [rows] bool, and log-probabilities of the asked tokens [asked] float64."""
        feed = Feed(self.model, cache)
        logits = feed(batch.prompts, batch.mask, only_last=True)
        exact, found = torch.ones(len(batch.prompts), dtype=torch.bool), []
        for place in range(batch.answers.shape[1]):
            answer, asked = batch.answers[:, place], batch.asked[:, place]
            exact &= ((logits[:, -1].argmax(-1) == answer) | ~asked).cpu()
            likely = logits[:, -1].double().log_softmax(-1).gather(1, answer[:, None])[:, 0]
            found.append(likely[asked].cpu())
            if place + 1 < batch.answers.shape[1]:
                logits = feed(answer[:, None])
        return exact, torch.cat(found)

    def summary(self, parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float | int]:
        """Share of exact answers with its 95 % interval (Wilson), mean log-probability of an answer's token (nats)."""
        exact = torch.cat([part for part, _ in parts])
        likely = torch.cat([part for _, part in parts])
        share = Proportion(int(exact.sum()), len(exact)).as_dict()
        return {**share, "log_probability": float(likely.mean())}

    def words(self, figures: dict[str, float | int]) -> str:
        """ "0.985 [0.957, 0.995], -0.021"."""
        return "{exact:.3f} [{low:.3f}, {high:.3f}], {log_probability:.3f}".format(**figures)

    def brief(self, figures: dict[str, float | int]) -> str:
        """ "0.985 -0.021"."""
        return "{exact:.3f} {log_probability:.3f}".format(**figures)


def token_pair(tokenizer: PreTrainedTokenizerBase, case: RetrievalCase) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the answer.

    The two are tokenised together and parted where the prompt alone would have ended otherwise: a tokenizer that joins
    the last space to the number has both in the answer.
    """
    alone, whole = (tokenizer(text)["input_ids"] for text in (case.prompt, case.prompt + case.answer))
    same = next((at for at, (one, other) in enumerate(zip(alone, whole, strict=False)) if one != other), len(alone))
    same = min(same, len(whole) - 1)
    if same < 1:
        raise UsageError("this tokenizer leaves no prompt before the answer; use another model")
    return whole[:same], whole[same:]


def batch(pairs: Sequence[tuple[list[int], list[int]]], pad: int, device: torch.device) -> RetrievalBatch:
    """Rows of one length. A shorter answer goes on with its last token, which is fed and not asked."""
    tokens, most = (max(map(len, part)) for part in zip(*pairs, strict=True))
    prompts = [[pad] * (tokens - len(prompt)) + prompt for prompt, _ in pairs]
    mask = [[0] * (tokens - len(prompt)) + [1] * len(prompt) for prompt, _ in pairs]
    answers = [answer + answer[-1:] * (most - len(answer)) for _, answer in pairs]
    asked = [[True] * len(answer) + [False] * (most - len(answer)) for _, answer in pairs]
    return RetrievalBatch(*(torch.tensor(part, device=device) for part in (prompts, mask, answers, asked)))
