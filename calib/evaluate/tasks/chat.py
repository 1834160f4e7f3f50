"""Questions as a conversation, in the words of the tokenizer's chat template.

What stands before an answer is the user's turn, the answer is the assistant's text, and each further question is a turn of
its own. The conversation is written once, with all its answers; everything that the template puts before an answer (the
header of the assistant's turn, an empty block of thoughts) is read with the prompt and not asked. A template has the
beginning of the text (`<s>`) among its own words, so its text is tokenised without the tokenizer's special tokens.
"""

import hashlib
import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from calib.documents.generators import Piece
from calib.errors import UsageError
from calib.runtime.messages.printable import printable, shortened

Turns = list[dict[str, str]]
DIGITS = 16  # of the SHA-256 that tells templates apart
SAMPLE: Turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


class Chat:
    """The chat template of a tokenizer, for one task.

    Args:
        tokenizer: the model's.
        task: its name, for messages.

    Attributes:
        identity: of the template and of what it writes today, the first 16 digits of a SHA-256 in hexadecimal. Some
            templates write the date.

    Raises:
        UsageError: a tokenizer without a chat template, or a template that refuses a question and its answer.
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
        """The text of `turns` and of the generation prompt behind them."""
        return self._written(turns, add_generation_prompt=True)

    def whole(self, turns: Turns) -> str:
        """The text of `turns`, the last answer with all that the template puts behind it."""
        return self._written(turns, add_generation_prompt=False)

    def pieces(self, document: Sequence[Piece]) -> list[Piece]:
        """The document as a conversation, up to its last answer.

        Raises UsageError where the template writes a conversation otherwise than it opens it, so that a model that
        generates would read something else.
        """
        turns = conversation(document)
        text, found, at = self.whole(turns), list[Piece](), 0
        for position in range(1, len(turns), 2):
            answer, before = turns[position]["content"], self.opened(turns[:position])
            start = text.find(answer, len(before)) if text.startswith(before) else -1
            if start < 0:
                raise UsageError(
                    f"tasks.{self.task}: this chat template writes answers otherwise than its generation prompt begins them; "
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
        except Exception as error:  # templates are programs and raise what they like
            raise UsageError(
                f"tasks.{self.task}: this model's chat template refuses a question "
                f"({shortened(' '.join(str(error).split()), 120)}); give chat_template: false"
            ) from error


def conversation(document: Sequence[Piece]) -> Turns:
    """Turns of the user and the assistant, one pair an answer; the line breaks between an answer and the next question,
    which the template's own take the place of, are left out, and so is what stands behind the last answer."""
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
