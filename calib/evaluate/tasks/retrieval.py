"""Line retrieval: a prompt of keyed lines is read into the cache, and the model is asked for the numbers of some of them.

    line rain: 4821 / line milk: 1190 / ... / ? / line milk:        -> 1190 / line rain:        -> 4821

The cases are from the evaluation split (`calib.documents.splits`): its pairs of key and number, and of neighbouring keys, are not
in the training split. With several `queries` each case is asked for several of its lines, one after another; the first is the one
that a single query asks for. An answer is scored token by token with teacher forcing: it is exact if every token is the most likely
one. That is equivalent to greedy generation giving the answer, since generation agrees with the true tokens up to its first
mistake. The log-probability of the answers' tokens distinguishes methods with equally many exact answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from calib.documents.generators import POOLS, Keys, Piece, RetrievalCase, Style, keyed_lines, keyed_random
from calib.errors import RunError, UsageError
from calib.evaluate.feed import Feed
from calib.evaluate.proportion import Proportion, exact_at
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, numbers, whole_number
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


class RetrievalBatch(NamedTuple):
    """A batch of cases, all int64.

    Attributes:
        prompts: left-padded ids of the prompts [rows, tokens].
        mask: 1 for real tokens, 0 for padding [rows, tokens].
        answers: ids of the text after the prompts, answers and further questions [rows, most].
        asked: number (1, 2, ...) of the row's answer that a token belongs to, 0 for tokens that are not scored [rows, most].
    """

    prompts: Tensor
    mask: Tensor
    answers: Tensor
    asked: Tensor


class TokenRow(NamedTuple):
    """Ids of a prompt and of the text after it; `asked` as in `RetrievalBatch`."""

    prompt: list[int]
    answers: list[int]
    asked: list[int]


class AnswersColumn:
    """A column of documents with equally many answers each, which are scored with teacher forcing.

    Args:
        subject: the evaluated model, tokenizer and settings.
        title: the column's title.
        settings: all that the documents depend on besides the seed.
        documents: the documents, one for each row.
        parts: for each document, the parts that its answers count for, such as ["depth 0.25"]; empty lists: no figures by part.
        what: name of the documents, for the message about documents that exceed the model's positions.
        remedy: advice in that message.
        chat: the chat template that renders the documents; None: documents are used unchanged.
    """

    measure_name = "exact answers, log p"
    reads_pages = False

    def __init__(
        self,
        subject: Subject,
        title: str,
        settings: dict[str, Any],
        documents: Sequence[Sequence[Piece]],
        parts: Sequence[Sequence[str]],
        what: str,
        remedy: str,
        chat: Chat | None = None,
    ) -> None:
        self.title, self.model = title, subject.model
        self.settings = settings if chat is None else {**settings, "chat_template": chat.identity}
        if chat is not None:
            documents = [chat.pieces(document) for document in documents]
        rows = [token_row(subject.tokenizer, document, special=chat is None) for document in documents]
        order = sorted(
            range(len(rows)), key=lambda position: len(rows[position].prompt)
        )  # little padding; a stable order
        rows, self.parts = [rows[position] for position in order], [parts[position] for position in order]
        self.rows = len(rows)
        self.prompt = sum(len(row.prompt) for row in rows) / len(rows)
        longest = max(len(row.prompt) + len(row.answers) for row in rows)
        subject.check_length(longest, what, remedy)
        self.longest_row = longest - 1  # a row's last token is not fed
        pad, size = subject.tokenizer.pad_token_id or 0, subject.batch_size
        self._batches = [
            batch([row[:2] for row in some], pad, self.model.device, [row.asked for row in some])
            for some in (rows[at : at + size] for at in range(0, len(rows), size))
        ]
        fed = sum(len(part.answers) * (part.answers.shape[1] - 1) for part in self._batches)
        self.length = self.prompt + fed / self.rows

    def batches(self) -> list[RetrievalBatch]:
        """Returns the cases in batches, shortest prompts first."""
        return self._batches

    def measure(self, cache: Cache, batch: RetrievalBatch) -> tuple[Tensor, Tensor]:
        """Returns whether each answer is exact, [rows x answers] bool, row by row, and the log-probability of each answer token,
        [answer tokens] float64."""
        feed = Feed(self.model, cache)
        logits = feed(batch.prompts, batch.mask, only_last=True)
        numbers = torch.arange(1, int(batch.asked.max()) + 1)
        exact, found = torch.ones(len(batch.prompts), len(numbers), dtype=torch.bool), []
        for position in range(batch.answers.shape[1]):
            answer, asked = batch.answers[:, position], batch.asked[:, position]
            right = (logits[:, -1].argmax(-1) == answer).cpu()
            exact &= right[:, None] | (asked.cpu()[:, None] != numbers)
            likely = logits[:, -1].double().log_softmax(-1).gather(1, answer[:, None])[:, 0]
            found.append(likely[asked > 0].cpu())
            if position + 1 < batch.answers.shape[1]:
                logits = feed(answer[:, None])
        return exact.flatten(), torch.cat(found)

    def cases(self) -> dict[str, Any]:
        """Returns the batches with the entries of `RetrievalBatch`, as plain JSON."""
        batches = [{name: part.tolist() for name, part in batch._asdict().items()} for batch in self.batches()]
        return {"kind": "answers", "batches": batches}

    def read_part(self, batch: RetrievalBatch, content: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Converts {"exact": booleans of each row's answers, "log_probability": one number for each answer token}."""
        wanted = len(batch.prompts) * int(batch.asked.max())
        exact = [answer for row in content.get("exact", ()) for answer in row]
        if len(exact) != wanted or not all(type(answer) is bool for answer in exact):
            raise RunError(f"a part answers {len(exact)} questions of {wanted}, expected true or false for each")
        return torch.tensor(exact), numbers(content, "log_probability", int((batch.asked > 0).sum()))

    def summary(self, parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float | int]:
        """Returns the share of exact answers with its 95 % interval, the mean log-probability of an answer token (nats), and the
        shares of the parts.

        The interval is Wilson's for as many cases as there are rows, since answers of one row are not independent.
        """
        exact = torch.cat([part for part, _ in parts]).view(self.rows, -1)
        likely = torch.cat([part for _, part in parts])
        share = Proportion(round(int(exact.sum()) / exact.shape[1]), self.rows).as_dict()
        grid = exact_at(self.parts, exact.tolist())
        return {**share, "exact": float(exact.double().mean()), "log_probability": float(likely.mean()), **grid}

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns "0.985 [0.957, 0.995], -0.021"."""
        return "{exact:.3f} [{low:.3f}, {high:.3f}], {log_probability:.3f}".format(**figures)

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns "0.985 -0.021"."""
        return "{exact:.3f} {log_probability:.3f}".format(**figures)


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


def token_row(tokenizer: PreTrainedTokenizerBase, document: Sequence[Piece], special: bool = True) -> TokenRow:
    """Tokenise a document up to its last answer. A token that contains the end of an answer and more belongs to the answer.

    `special` says whether the tokenizer adds its special tokens; the text of a chat template contains its own.
    """
    positions = [position for position, piece in enumerate(document) if piece.is_answer]
    texts = ["".join(piece.text for piece in document[:position]) for position in range(len(document) + 1)]
    until = texts[positions[-1] + 1]
    prompt, rest = token_pair(tokenizer, RetrievalCase(texts[positions[0]], until[len(texts[positions[0]]) :]), special)
    whole, asked = prompt + rest, [0] * len(rest)
    for number, position in enumerate(positions, 1):
        before, after = (
            tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts[position : position + 2]
        )
        start = len(prompt) if number == 1 else shared(before, whole)
        same = shared(after, whole)
        end = same if same == len(after) else same + 1
        asked[start - len(prompt) : end - len(prompt)] = [number] * (end - start)
    return TokenRow(prompt, rest, asked)


def token_pair(
    tokenizer: PreTrainedTokenizerBase, case: RetrievalCase, special: bool = True
) -> tuple[list[int], list[int]]:
    """Returns the ids of the prompt and of the answer.

    The two are tokenised together and split at the first token that differs from those of the prompt alone: if a tokenizer joins
    the prompt's last space with the number, that token belongs to the answer. `special` as in `token_row`.
    """
    texts = (case.prompt, case.prompt + case.answer)
    alone, whole = (tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts)
    same = min(shared(alone, whole), len(whole) - 1)
    if same < 1:
        raise UsageError("this tokenizer leaves no prompt before the answer; use another model")
    return whole[:same], whole[same:]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix of two lists of ids."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def batch(
    pairs: Sequence[tuple[list[int], list[int]]],
    pad: int,
    device: torch.device,
    asked: Sequence[list[int]] | None = None,
) -> RetrievalBatch:
    """Pads (prompt, answer) pairs to one batch. Shorter answers are padded with their last token, which is not scored.

    `asked` is as in `RetrievalBatch`; without it all tokens after a prompt are one answer.
    """
    tokens, most = (max(map(len, part)) for part in zip(*pairs, strict=True))
    prompts = [[pad] * (tokens - len(prompt)) + prompt for prompt, _ in pairs]
    mask = [[0] * (tokens - len(prompt)) + [1] * len(prompt) for prompt, _ in pairs]
    answers = [answer + answer[-1:] * (most - len(answer)) for _, answer in pairs]
    numbers = asked if asked is not None else [[1] * len(answer) for _, answer in pairs]
    filled = [row + [0] * (most - len(row)) for row in numbers]
    return RetrievalBatch(*(torch.tensor(part, device=device) for part in (prompts, mask, answers, filled)))
