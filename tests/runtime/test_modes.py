"""A cache in torch's modes: inference mode, autocast, gradients; and errors of caches that are released or pickled."""

import copy
import io
import pickle

import pytest
import torch
from cases import BY_NAME, CASES
from one_line import message
from toy_models import FAMILIES, generate, left_padded, random_model
from transformers import DynamicCache

from calib.runtime import compress
from calib.runtime.cache import CompressedCache
from calib.runtime.logits import Logits

IDS = left_padded([60], seed=1)["input_ids"]
STEP, MORE = IDS[:, :1], left_padded([45], seed=2)["input_ids"]
FORWARDS = (IDS, STEP, STEP, MORE, STEP, STEP)  # in some of them blocks are encoded and slots reused
METHODS = [
    BY_NAME[name] for name in ("full", "kivi-2-short", "zipcache-short", "h2o", "mikv-16-2", "specache", "infllm")
]
METHODS += [BY_NAME[name] for name in ("gear", "csr-tiers", "klt-short", "streaming_llm", "offload")]


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def logits(cache: CompressedCache, model, modes) -> list[torch.Tensor]:
    """Logits of `FORWARDS`, which run in the `modes` in turn."""
    found = []
    for number, ids in enumerate(FORWARDS):
        with modes[number % len(modes)]():
            found.append(model(input_ids=ids, past_key_values=cache).logits.detach().clone())
    return found


# ---- inference mode


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cache_filled_in_inference_mode_is_used_outside(model, case):
    with case.open(model) as cache, case.open(model) as mixed:
        expected = logits(cache, model, [torch.no_grad])
        found = logits(mixed, model, [torch.inference_mode, torch.no_grad, torch.no_grad])
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("case", METHODS, ids=str)
def test_rows_that_are_chosen_saved_and_copied_in_inference_mode_are_used_outside(model, case, tmp_path):
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with case.open(model) as cache, mode():
            model(input_ids=IDS, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.save(tmp_path / "prefix.safetensors")
            copied = copy.deepcopy(cache)
        with torch.no_grad(), copied:
            outputs.append(logits_of_rows(copied, model))
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def logits_of_rows(cache, model) -> list[torch.Tensor]:
    return [model(input_ids=ids.expand(2, -1), past_key_values=cache).logits for ids in (STEP, MORE, STEP)]


# ---- autocast


@pytest.mark.parametrize("case", CASES, ids=str)
def test_under_autocast_a_cache_computes_as_without(model, case):
    """Under autocast values arrive in bfloat16 (keys, after RoPE, in float32): outputs have the bits of equal float32 numbers."""
    draw, found = torch.Generator().manual_seed(1), []
    columns = [ids.shape[1] for ids in FORWARDS]
    given = [[torch.randn(1, heads, n, 32, generator=draw) for heads in (4, 2, 2)] for n in columns]
    for narrow in (False, True):
        with case.open(model) as cache, torch.autocast("cpu", torch.bfloat16, enabled=narrow), torch.no_grad():
            for query, keys, values in given:
                values = values.bfloat16() if narrow else values.bfloat16().float()
                for layer in range(2):
                    held, _ = cache.update(keys, values, layer)
                    found.append(held.attend(query, None, Logits(32**-0.5, None, None)))
    assert all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))


def test_a_model_generates_under_autocast(model):
    """Under autocast RoPE makes bfloat16 keys float32 again, and values stay bfloat16."""
    found = []
    for cache in (DynamicCache(config=model.config), compress(model, "full")):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            found.append(model(input_ids=IDS, past_key_values=cache).logits.float())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.02 * float(found[0].abs().max()))
    cache.release()


# ---- gradients


@pytest.mark.parametrize("case", METHODS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompts_gradients_are_those_of_plain_attention(family, case):
    model, inputs, found = random_model(family), left_padded([70, 55]), []
    for cache in (DynamicCache(config=model.config), case.open(model)):
        model.zero_grad()
        real = inputs["attention_mask"][..., None].bool()
        model(**inputs, past_key_values=cache).logits.masked_fill(~real, 0).square().sum().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))


@pytest.mark.parametrize("case", METHODS, ids=str)
@pytest.mark.parametrize("ids", [STEP, MORE], ids=["a step", "several tokens"])
def test_gradients_through_what_is_stored_are_refused_in_a_line(model, case, ids):
    with case.open(model) as cache:
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache)
        output = model(input_ids=ids, past_key_values=cache).logits
        with pytest.raises(ValueError, match="gradients do not go through a compressed cache") as caught:
            output.sum().backward()
        assert "torch.no_grad()" in message(caught)


@pytest.mark.parametrize("case", METHODS, ids=str)
def test_training_is_refused_at_the_first_forward_over_what_is_stored(case):
    model = random_model("llama").train()
    with case.open(model) as cache:
        model(input_ids=IDS, past_key_values=cache).logits.sum().backward()
        with pytest.raises(ValueError, match="gradients do not go through a compressed cache") as caught:
            model(input_ids=MORE, past_key_values=cache)
        assert message(caught)


# ---- released, pickled, another model's


@pytest.mark.parametrize("other", [False, True], ids=["", "while another is attached"])
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
def test_a_released_cache_says_so_when_it_is_used(model, other, copied):
    cache = compress(model, method="kivi")
    generate(model, left_padded([9]), cache)
    cache.release()
    held = compress(model, method="kivi") if other else None
    used = copy.deepcopy(cache) if copied else cache
    with pytest.raises(ValueError, match="this cache was released") as caught, torch.no_grad():
        model(input_ids=STEP, past_key_values=used)
    assert "compress(model, ...)" in message(caught)
    assert used.memory().measured_bytes > 0  # what it holds can still be measured
    if held is not None:
        held.release()


@pytest.mark.parametrize("dump", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO()), copy.copy])
def test_a_cache_is_not_pickled(model, dump):
    with compress(model, method="kivi") as cache:
        with pytest.raises(TypeError, match="a compressed cache is not pickled") as caught:
            dump(cache)
        assert "cache.save(path)" in message(caught)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"head_dim": 64}, {"dtype": torch.bfloat16}], ids=str)
def test_another_models_tokens_are_refused(model, changes):
    changes = dict(changes)
    other = random_model("llama", changes.pop("dtype", torch.float32), **changes)
    with compress(model, method="kivi") as cache, compress(other, method="kivi"), torch.no_grad():
        model(input_ids=IDS, past_key_values=cache)
        with pytest.raises(ValueError, match="use a cache for each model and dtype") as caught:
            other(input_ids=STEP, past_key_values=cache)
        assert "this layer holds keys of float32, 2 heads of 32 channels, and got" in message(caught)
