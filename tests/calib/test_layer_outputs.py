"""Forward passes that begin at a later layer, against whole ones."""

from copy import copy

import pytest
import torch
from toy_models import FAMILIES, VOCABULARY, biased_model, random_model
from transformers import DynamicCache
from transformers.cache_utils import Cache

from calib.capture.layer_outputs import LayerOutputs

MODELS = {
    **{family: lambda family=family: random_model(family, num_hidden_layers=3, **three(family)) for family in FAMILIES},
    "phi": lambda: biased_model(partial=True, num_hidden_layers=3),
}


def three(family):
    """Return the type of each of three layers for families whose layers have several types."""
    mixed = ["full_attention", "sliding_attention", "full_attention"]
    return {"layer_types": mixed} if "layer_types" in FAMILIES[family][2] else {}


def with_keys(cache, layer):
    """A copy of the cache with other keys of one layer."""
    layers = [copy(one) for one in cache.layers]
    generator = torch.Generator().manual_seed(layer)
    layers[layer].keys = torch.randn(layers[layer].keys.shape, generator=generator)
    return Cache(layers=layers)


@pytest.fixture(params=MODELS)
@torch.no_grad()
def recorded(request):
    """A model, a cache of 40 tokens, the 8 tokens after them, and the recorded layer outputs of those 8."""
    model = MODELS[request.param]()
    tokens = torch.randint(2, VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(tokens[:, :40], past_key_values=cache)
    outputs = LayerOutputs(model)
    with outputs.recorded():
        model(tokens[:, 40:], past_key_values=Cache(layers=[copy(one) for one in cache.layers]))
    return model, cache, tokens[:, 40:], outputs


@torch.no_grad()
def test_logits_are_those_of_a_whole_pass(recorded):
    model, cache, answer, outputs = recorded
    said = model(answer, past_key_values=Cache(layers=[copy(one) for one in cache.layers])).logits
    for layer in range(3):
        whole = model(answer, past_key_values=with_keys(cache, layer)).logits
        with outputs.begun_at(layer):
            part = model(answer, past_key_values=(other := with_keys(cache, layer))).logits
        assert torch.equal(whole, part) and not torch.allclose(said, part)
        grown = [one.get_seq_length() for one in other.layers]
        assert grown == [40] * layer + [48] * (3 - layer)


@torch.no_grad()
def test_the_model_is_what_it_was_whatever_happens(recorded):
    model, cache, answer, outputs = recorded
    layer, said = outputs.layers[0], model(answer, past_key_values=with_keys(cache, 0)).logits
    with pytest.raises(ValueError, match="exactly one"), outputs.begun_at(2):
        model()
    assert not any("forward" in vars(one) for one in outputs.layers.values())
    assert torch.equal(said, model(answer, past_key_values=with_keys(cache, 0)).logits)
    # A layer's own attribute `forward`, which accelerate sets on offloaded layers, is restored.
    own = layer.forward = layer.forward
    with outputs.begun_at(1):
        assert layer.forward is not own
    assert vars(layer)["forward"] is own


def test_a_layer_is_what_an_attention_module_is_part_of(recorded):
    model, _, _, outputs = recorded
    assert list(outputs.layers.values()) == list(model.model.layers)
    assert not any(one._forward_hooks for one in outputs.layers.values())
