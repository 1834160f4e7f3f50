"""Passkey retrieval (Mohtashami & Jaggi, arXiv:2305.16300): a number hidden in a text that repeats five sentences.

    There is an important info hidden inside a lot of irrelevant text. ...
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The grass is green. ...
    The pass key is 30418. Remember it. 30418 is the pass key.
    The grass is green. The sky is blue. ...
    What is the pass key? The pass key is

The text is the paper's, and answers are scored as by its code: the first number of the generated text must be the pass key.
A row has as many whole sentences as fit into its length, and fixed depths; the paper counts characters and draws depths at random.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from calib.documents.generators import keyed_random
from calib.documents.running_text import RunningText
from calib.evaluate.tasks.chat import Chat, check_chat
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.generated import GeneratedColumn, Question, tokens_of
from calib.evaluate.tasks.haystack import case_depths, check_grid, check_lengths, filled, from_the_first, running_text
from calib.evaluate.tasks.longeval import first_number

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
LARGEST = 50_000  # largest pass key; the smallest is 1


@dataclass(frozen=True)
class Passkey:
    """A task with one column for each length.

    Args:
        lengths: most tokens of a row, question and answer included.
        depths: depths of the pass key, as shares of the sentences before it.
        cases: independent cases at each depth.
        new_tokens: most new tokens of an answer. The paper's code has 10, too few for an answer that begins with a sentence.
        title: text before the length in a column's title.
        chat_template: use the tokenizer's chat template, whose tokens count for `lengths` as well; everything is one user's turn.
    """

    lengths: tuple[int, ...] = (512,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    cases: int = 20
    new_tokens: int = 32
    title: str = "passkey"
    chat_template: bool = False

    def __post_init__(self) -> None:
        check_grid("passkey", self)
        whole_number("passkey", "new_tokens", self.new_tokens, 1)
        check_title("passkey", self.title)
        check_chat("passkey", self.chat_template)

    def titles(self) -> list[str]:
        """Returns the titles "passkey 512", "passkey 1024", ..."""
        return [f"{self.title} {length}" for length in self.lengths]

    def columns(self, subject: Subject) -> list[Column]:
        """Makes the texts; raises UsageError for lengths that are too long for the model or too short for the question."""
        check_lengths("passkey", self, subject)
        chat = Chat(subject.tokenizer, "passkey") if self.chat_template else None
        running = running_text("passkey", subject, FILLER)
        return [PasskeyColumn(self, length, running, subject, chat) for length in self.lengths]


class PasskeyColumn(GeneratedColumn):
    """Rows of one length with a pass key each."""

    def __init__(self, task: Passkey, length: int, running: RunningText, subject: Subject, chat: Chat | None) -> None:
        rows, new = case_depths(task, subject), task.new_tokens
        questions = [question(subject, running, length, depth, new, index, chat) for index, depth in rows]
        settings = {"length": length, "depths": list(task.depths)}
        parts, title = [f"depth {depth:g}" for _, depth in rows], f"{task.title} {length}"
        super().__init__(subject, "passkey", title, settings, questions, first_number, new, (), chat, None, parts)


def question(
    subject: Subject, running: RunningText, length: int, depth: float, new: int, index: int, chat: Chat | None
) -> Question:
    """Returns case `index` at `depth` in at most `length` tokens, including `new` tokens of an answer and the chat template."""
    key = keyed_random("passkey", subject.seed, index, length, depth).randint(1, LARGEST)
    candidates = from_the_first(running)
    return filled(
        "passkey",
        length,
        running,
        candidates,
        lambda sentences: Question(prompt(sentences, depth, key), str(key)),
        lambda asked: len(tokens_of(subject, asked, chat)) + new,
    )


def prompt(sentences: Sequence[str], depth: float, key: int) -> str:
    """Returns the prompt: the pass key among the sentences, which start from the first one again after it."""
    at = round(depth * len(sentences))
    before, after = ("".join(part).lstrip() for part in (sentences[:at], sentences[: len(sentences) - at]))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    return "\n".join([TASK, before, needle, after, QUESTION])
