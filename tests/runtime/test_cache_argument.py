"""Hooks on a model's forward find the cache under every name that transformers has for the argument."""

import pytest
import torch
from step_tape import Tape
from toy_models import left_padded, random_model

from calib.evaluate.entries.entry import counting
from calib.runtime import compress
from calib.runtime.cache_argument import NAME, NAMES, cache_in
from calib.runtime.graphs import step_graphs

# The names that this release of transformers accepts: its own, and older ones.
TAKEN = NAMES[NAMES.index(NAME) :]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_found_by_either_name(name):
    cache = object()
    assert cache_in({"input_ids": None, name: cache}) is cache
    assert cache_in(dict.fromkeys(NAMES) | {name: cache}) is cache
    assert cache_in({"use_cache": True}) is None


@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_a_step_brings_a_speculative_token(model, name):
    with compress(model, method="specache") as cache:
        token = model(**left_padded([60, 90]), **{name: cache}).logits[:, -1:].argmax(-1)
        logits = model(token, **{name: cache}).logits
        assert cache.speculator.tokens.shape == (2,)
        assert logits.shape[1] == 1


@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_steps_are_recorded(model, name, monkeypatch):
    monkeypatch.setattr(step_graphs, "recorder", lambda device: Tape)
    with compress(model, method="kivi", graphs=True) as cache:
        token = model(**left_padded([60, 60]), **{name: cache}).logits[:, -1:].argmax(-1)
        for _ in range(3):
            token = model(input_ids=token, **{name: cache}).logits[:, -1:].argmax(-1)
        assert cache.graphs.replays > 0


@pytest.mark.parametrize("name", TAKEN)
def test_tokens_of_an_evaluation_are_counted(model, name):
    with compress(model, method="kivi") as cache, counting(model, cache) as seen:
        model.generate(**left_padded([60, 60]), **{name: cache}, max_new_tokens=3, do_sample=False)
    assert seen.tokens() == 2 * 62


def test_custom_generate_takes_either_name(model):
    with compress(model, method="kivi") as cache, compress(model, method="kivi") as other:
        inputs = left_padded([60]) | {"max_new_tokens": 2, "do_sample": False}
        found = model.generate(**inputs, **{NAME: cache}, custom_generate=cache.custom_generate)
        assert found.shape == (1, 62)
        with pytest.raises(ValueError, match=f"pass {NAME}=cache with custom_generate="):
            model.generate(**inputs, **{NAME: other}, custom_generate=cache.custom_generate)
