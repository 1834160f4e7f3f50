"""Answers that are scored token by token with teacher forcing: one is exact if every token is the most likely one.

That is equivalent to greedy generation giving the answer, since generation agrees with the true tokens up to its first mistake. The
log-probability of the answers' tokens distinguishes methods with equally many exact answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from calib.documents.generators import Piece
from calib.errors import RunError
from calib.evaluate.feed import Feed
from calib.evaluate.proportion import Proportion, exact_at
from calib.evaluate.tasks.answer_tokens import AnswerBatch, batch, token_row
from calib.evaluate.tasks.chat import Chat
from calib.evaluate.tasks.contract import Subject, numbers


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

    def batches(self) -> list[AnswerBatch]:
        """Returns the cases in batches, shortest prompts first."""
        return self._batches

    def measure(self, cache: Cache, batch: AnswerBatch) -> tuple[Tensor, Tensor]:
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
        """Returns the batches with the entries of `AnswerBatch`, as plain JSON."""
        batches = [{name: part.tolist() for name, part in batch._asdict().items()} for batch in self.batches()]
        return {"kind": "answers", "batches": batches}

    def read_part(self, batch: AnswerBatch, content: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
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
