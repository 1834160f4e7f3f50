"""Passkey retrieval (Mohtashami & Jaggi, arXiv:2305.16300): a number in a text of five sentences that come again and again.

    There is an important info hidden inside a lot of irrelevant text. ...
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The grass is green. ...
    The pass key is 30418. Remember it. 30418 is the pass key.
    The grass is green. The sky is blue. ...
    What is the pass key? The pass key is

The words are the paper's, whose code also reads the answer: the first number of the generated text is the pass key, or it is wrong.
There are as many whole sentences as a row's length holds; the paper counts characters, and draws the place at random where the
grid has its depths.
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
LARGEST = 50_000  # pass key; the least is 1


@dataclass(frozen=True)
class Passkey:
    """One column a length.

    Args:
        lengths: tokens of a row, question and answer included, at most.
        depths: of the pass key, by sentences.
        cases: independent cases at each depth.
        new_tokens: of an answer at most. The paper's code has 10, too few for one that begins with a sentence.
        title: what stands before the length in a column's title.
        chat_template: ask in the words of the tokenizer's chat template, whose tokens count as well: all is the user's turn.
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
        """ "passkey 512", "passkey 1024", ..."""
        return [f"{self.title} {length}" for length in self.lengths]

    def columns(self, subject: Subject) -> list[Column]:
        """Writes the texts; refuses lengths that the model, or the question, does not allow."""
        check_lengths("passkey", self, subject)
        chat = Chat(subject.tokenizer, "passkey") if self.chat_template else None
        running = running_text("passkey", subject, FILLER)
        return [PasskeyColumn(self, length, running, subject, chat) for length in self.lengths]


class PasskeyColumn(GeneratedColumn):
    """Pass keys in rows of one length."""

    def __init__(self, task: Passkey, length: int, running: RunningText, subject: Subject, chat: Chat | None) -> None:
        rows, new = case_depths(task, subject), task.new_tokens
        questions = [question(subject, running, length, depth, new, index, chat) for index, depth in rows]
        settings = {"length": length, "depths": list(task.depths)}
        parts, title = [f"depth {depth:g}" for _, depth in rows], f"{task.title} {length}"
        super().__init__(subject, "passkey", title, settings, questions, first_number, new, (), chat, None, parts)


def question(
    subject: Subject, running: RunningText, length: int, depth: float, new: int, index: int, chat: Chat | None
) -> Question:
    """Case `index` at `depth`, within `length` tokens with `new` ones of an answer and the chat's words."""
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
    """The pass key among the sentences, which begin anew behind it."""
    at = round(depth * len(sentences))
    before, after = ("".join(part).lstrip() for part in (sentences[:at], sentences[: len(sentences) - at]))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    return "\n".join([TASK, before, needle, after, QUESTION])
