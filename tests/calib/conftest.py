"""The tokenizer and the text of the embedded model's tests, made once for each test file; special tokens that are looked for."""

import pytest
from toy_pretraining import PROSE

from benchmarks.embedded_model.tokenizer import train_tokenizer
from calib.documents.generators import keyed_random
from calib.documents.words import WORDS
from calib.runtime.stages.saliency.probes import Probes


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer large enough that every word of the documents is one token."""
    return train_tokenizer(PROSE * 20, vocabulary=2048, documents=300)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    """A file of made-up text with some variety."""
    rng = keyed_random("prose")
    lines = (" ".join(rng.choice(WORDS) for _ in range(9)) + ".\n" for _ in range(300))
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def probed_ids(monkeypatch):
    """A set that gets the ids of special tokens whenever the probes of a prompt are chosen."""
    asked, of_prompt = set(), Probes.of_prompt

    def watched(self, *given):
        asked.add(self.special_ids)
        return of_prompt(self, *given)

    monkeypatch.setattr(Probes, "of_prompt", watched)
    return asked
