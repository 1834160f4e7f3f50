"""The subject with which a plan makes an evaluation's columns: the model's tokenizer, and English text for sampled text."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from calib.capture.language_model import without_notes, without_waiting_for_the_hub
from calib.capture.model_files import ModelFiles
from calib.evaluate.tasks import Subject

# The model whose tokenizer counts tokens if the planned model's own tokenizer is missing.
EMBEDDED = "artifacts/tiny-llama"
TURNS = (
    "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = "The river had risen in the night, and by the morning nobody could cross the old bridge below the mill. "


@dataclass(frozen=True)
class PlannedSubject(Subject):
    """A model without weights: text that the model would sample is replaced by English text of as many tokens."""

    def sampled(self, first: int, length: int, count: int) -> Tensor:
        words = self.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        row = torch.tensor([first, *(words * -(-length // len(words)))[: length - 1]])
        return row.expand(count, length)


def planned_tokenizer(path: str) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Returns the tokenizer of the model at `path` and None; if there is none, the embedded model's tokenizer and the reason."""
    found = ModelFiles.find(path)
    with without_waiting_for_the_hub(), without_notes():
        try:
            return AutoTokenizer.from_pretrained(found.path, **found.options), None
        except Exception as error:  # transformers raises many types; each means that there is none
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip(' :')}"
        tokenizer: Any = AutoTokenizer.from_pretrained(ModelFiles.find(EMBEDDED).path)
    tokenizer.chat_template = TURNS
    return tokenizer, reason
