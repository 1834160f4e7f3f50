"""The memory report: bytes of `DynamicCache` for the same tokens, and whether anything is encoded yet."""

import pytest
import torch
from cases import BY_NAME
from layer_walk import Tokens, feed
from toy_models import left_padded, random_model
from transformers import DynamicCache

from calib.runtime import compress
from calib.runtime.memory import measure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3-mixed"])
def test_dynamic_bytes_are_those_of_a_dynamic_cache(family, dtype):
    model = random_model(family, dtype)
    ids = left_padded([9])["input_ids"].repeat(2, 20)  # 180 tokens, more than the sliding windows
    cache, dynamic = compress(model, "kivi", residual=32), DynamicCache(config=model.config)
    with cache:
        model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    model.generate(ids, past_key_values=dynamic, max_new_tokens=4, do_sample=False)
    # The tensors of its layers; after a prompt a window is a view, which keeps the whole prompt's storage.
    kept = sum(part.numel() * part.element_size() for layer in dynamic.layers for part in (layer.keys, layer.values))
    assert cache.memory().dynamic_bytes == kept
    if family == "llama":
        assert kept == measure(dynamic)


def test_the_share_is_of_dynamic_cache_in_the_models_own_dtype():
    model = random_model("llama", torch.float32)
    cache = compress(model, "kivi", bits=2, residual=32)
    cache.release()
    feed(cache, [Tokens.random(model, 400, seed=1)])
    memory = cache.memory()
    assert (
        f"{100 * memory.measured_bytes / memory.dynamic_bytes:.1f} % of DynamicCache's {memory.dynamic_bytes:,}"
        in str(memory)
    )
    assert memory.measured_bytes / memory.dynamic_bytes == pytest.approx(memory.bits_per_value / 32)
    assert "of 16" not in str(memory)


@pytest.mark.full
@pytest.mark.parametrize("name", ["kivi-2", "zipcache", "klt-short", "specache", "csr", "full", "rtn-4"])
def test_it_is_said_while_every_token_is_exact_in_the_window(name):
    model = random_model("llama")
    cache = BY_NAME[name].open(model)
    cache.release()
    assert not cache.memory().nothing_encoded and "nothing" not in str(cache.memory())  # an empty cache
    tokens = Tokens.random(model, 200, seed=1)
    said = []
    for at in range(200):
        feed(cache, [tokens[at : at + 1]])
        memory = cache.memory()
        codes = sum(memory.by_kind[kind] for kind in ("codes", "exact"))
        assert memory.nothing_encoded == (codes == 0), at
        assert (f"nothing is encoded yet (all {at + 1} tokens" in str(memory)) == memory.nothing_encoded
        assert ("bits per value" in str(memory)) != memory.nothing_encoded
        said.append(memory.nothing_encoded)
    assert said == [True] * sum(said) + [False] * (200 - sum(said))
    assert (sum(said) > 0) == (name not in ("full", "rtn-4"))
