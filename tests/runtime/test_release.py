"""The model after a cache was released, dropped or interrupted is exactly as before; other caches go on meanwhile."""

import copy
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tolerances import LOGITS
from toy_models import COMMON, HEADS_4_2_32, NEW, generate, left_padded, random_model
from transformers import DynamicCache, LlavaConfig, LlavaForConditionalGeneration

from calib.runtime import attachment, compress


def state_of(model):
    """Everything about a model that attaching a cache could leave changed."""
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    weights = {name: value.data_ptr() for name, value in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.forward.__func__) for m in model.modules()]
    return [copy.deepcopy(vars(config)) for config in configs], model.config.to_dict(), weights, hooks, model.training


# A method that replaces attention alone, and one that also hooks the forward for token ids.
KIVI, SPECIAL = {"method": "kivi"}, {"method": "zipcache", "probes": "special", "special_ids": [7, 8]}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed"])
@pytest.mark.parametrize("wanted", [KIVI, SPECIAL], ids=["kivi", "special probes"])
def test_the_model_is_as_before_after_with_release_and_exception(family, implementation, wanted):
    model = random_model(family)
    model.set_attn_implementation(implementation)
    before, inputs = state_of(model), left_padded([20])
    logits = model(**inputs).logits

    with compress(model, **wanted) as cache:
        assert model.config._attn_implementation != implementation
        generate(model, inputs, cache)
    assert state_of(model) == before

    cache = compress(model, **wanted)
    cache.release()
    cache.release()  # twice does no harm
    assert state_of(model) == before

    def stop(*_):
        raise ZeroDivisionError

    hook = model.lm_head.register_forward_hook(stop)  # the forward fails after every layer has stored it
    with pytest.raises(ZeroDivisionError), compress(model, **wanted) as cache:
        generate(model, inputs, cache)
    hook.remove()
    assert state_of(model) == before
    assert torch.equal(model(**inputs).logits, logits)


@pytest.mark.parametrize("wanted", [KIVI, SPECIAL], ids=["kivi", "special probes"])
def test_the_model_is_as_before_when_a_cache_is_dropped(wanted):
    model = random_model("llama")
    before = state_of(model)
    cache = compress(model, **wanted)
    generate(model, left_padded([20]), cache)
    del cache
    gc.collect()
    assert state_of(model) == before


def test_the_last_of_several_caches_gives_the_model_back():
    model = random_model("llama")
    before = state_of(model)
    first, second = compress(model, **SPECIAL), compress(model, method="full")
    first.release()
    assert state_of(model) != before
    assert generate(model, left_padded([9]), second).sequences.shape == (1, 9 + NEW)
    second.release()
    assert state_of(model) == before


def test_a_refused_request_leaves_the_model_alone():
    model = random_model("llama")
    before = state_of(model)
    for wrong in ({"method": "kivi", "bits": 9}, {"method": "kivi", "group": 24}, {"method": "nothing"}):
        with pytest.raises(ValueError, match=r"\S"):
            compress(model, **wrong)
        assert state_of(model) == before


@pytest.mark.parametrize("wanted", [KIVI, SPECIAL, {"method": "streaming_llm", "window": 9}], ids=str)
def test_a_cache_does_not_keep_its_model_alive(wanted):
    model = random_model("llama")
    cache, reference = compress(model, **wanted), weakref.ref(model)
    generate(model, left_padded([9]), cache)
    del model
    gc.collect()
    assert reference() is None
    assert cache.memory().measured_bytes > 0
    cache.release()


def test_threads_that_share_a_model_leave_it_as_before(monkeypatch):
    model = random_model("llama")
    before, took = state_of(model), attachment._attached

    def slowly(*given):  # as for a model of many parts
        found = took(*given)
        time.sleep(0.002)
        return found

    monkeypatch.setattr(attachment, "_attached", slowly)

    def hold(_):
        for _ in range(20):
            compress(model, "full").release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, range(4)))
    assert state_of(model) == before


def test_without_our_cache_an_attached_model_attends_exactly():
    model, inputs = random_model("mistral-sliding"), left_padded([70, 90])
    expected = generate(model, inputs, DynamicCache(config=model.config)).sequences
    with compress(model, method="kivi"):
        assert torch.equal(generate(model, inputs, DynamicCache(config=model.config)).sequences, expected)
        logits = model(**inputs, use_cache=False).logits
    torch.testing.assert_close(logits, model(**inputs, use_cache=False).logits, atol=LOGITS, rtol=0)


def test_a_released_cache_fails_loudly_instead_of_answering():
    model = random_model("llama")
    cache = compress(model, method="kivi")
    cache.release()
    with pytest.raises(ValueError, match="this cache was released"):
        generate(model, left_padded([9]), cache)


def test_an_encoder_of_images_keeps_its_own_attention():
    """It attends in both directions, ours is causal."""
    sight = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 32,
    }
    config = LlavaConfig(
        text_config={"model_type": "llama"} | COMMON | HEADS_4_2_32,
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14} | sight,
        image_token_index=3,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.model.vision_tower.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    ids = torch.tensor([[5, 3, 3, 3, 3, *range(10, 40)]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 28, 28)}
    expected = generate(model, inputs, DynamicCache(config=model.config))
    with compress(model, "full") as cache:
        found = generate(model, inputs, cache)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
