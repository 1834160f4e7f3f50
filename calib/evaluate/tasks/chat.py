"""Turns questions into a conversation with the tokenizer's chat template.

The text before an answer is the user's turn, the answer is the assistant's text, and each further question is another user's turn.
The conversation is rendered once, with all its answers; everything that the template puts before an answer (the header of the
assistant's turn, an empty block of thoughts) belongs to the prompt and is not scored. A template contains the start token (`<s>`)
itself, so its text is tokenised without the tokenizer's special tokens.
"""

import hashlib
import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from calib.documents.generators import Piece
from calib.errors import UsageError
from calib.runtime.messages.printable import printable, shortened

Turns = list[dict[str, str]]
DIGITS = 16  # hexadecimal digits of the SHA-256 that identifies a template
SAMPLE: Turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


class Chat:
    """The chat template of a tokenizer, for one task.

    Args:
        tokenizer: the model's tokenizer.
        task: the task's name, for messages.

    Attributes:
        identity: the first 16 hexadecimal digits of a SHA-256 of the template and of a sample rendered with it (some templates
            include the date).

    Raises:
        UsageError: if the tokenizer has no chat template, or the template refuses a question and its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: str) -> None:
        self.tokenizer, self.task = tokenizer, task
        if not tokenizer.chat_template:
            raise UsageError(
                f"tasks.{task}.chat_template is true and this model's tokenizer has no chat template; "
                "give a model that has one (often called instruct or chat), or chat_template: false"
            )
        written = [tokenizer.chat_template, self.whole(SAMPLE), self.opened(SAMPLE[:1])]
        self.identity = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:DIGITS]

    def opened(self, turns: Turns) -> str:
        """Renders `turns` with the generation prompt after them."""
        return self._written(turns, add_generation_prompt=True)

    def whole(self, turns: Turns) -> str:
        """Renders `turns`, with everything that the template puts after the last answer."""
        return self._written(turns, add_generation_prompt=False)

    def pieces(self, document: Sequence[Piece]) -> list[Piece]:
        """Returns the document as pieces of a rendered conversation, up to its last answer.

        Raises UsageError if the rendered conversation does not begin with the rendered prompt of each answer, since then a model
        that generates would read another prompt.
        """
        turns = conversation(document)
        text, found, at = self.whole(turns), list[Piece](), 0
        for position in range(1, len(turns), 2):
            answer, before = turns[position]["content"], self.opened(turns[:position])
            start = text.find(answer, len(before)) if text.startswith(before) else -1
            if start < 0:
                raise UsageError(
                    f"tasks.{self.task}: this chat template does not begin an answer as its generation prompt does; "
                    "give chat_template: false, or a task that generates (longeval, gsm8k, passkey)"
                )
            found += [Piece(text[at:start], False), Piece(answer, True)]
            at = start + len(answer)
        return found

    def _written(self, turns: Turns, add_generation_prompt: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # templates are programs and raise exceptions of any type
            raise UsageError(
                f"tasks.{self.task}: this model's chat template refuses a question "
                f"({shortened(' '.join(str(error).split()), 120)}); give chat_template: false"
            ) from error


def conversation(document: Sequence[Piece]) -> Turns:
    """Returns turns of user and assistant, one pair for each answer, without the line breaks between an answer and the next
    question (the template has its own separators) and without the text after the last answer."""
    turns: Turns = []
    question = ""
    for piece in document:
        if piece.is_answer:
            asked = question.lstrip("\n") if turns else question
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": piece.text}]
            question = ""
        else:
            question += piece.text
    return turns


def check_chat(task: str, chat_template: object) -> None:
    """Raises UsageError unless the option `chat_template` is true or false."""
    if not isinstance(chat_template, bool):
        raise UsageError(f"'tasks.{task}.chat_template' must be true or false, got {printable(chat_template)}")
