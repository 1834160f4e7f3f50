"""Capture sees exactly what the model's attention sees, holds one layer at a time, and leaves the model as it was."""

import gc
import weakref

import pytest
import torch
from toy_language_model import CONFIGS, SIZES, toy_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from calib.capture.attention import NAME
from calib.capture.capture import attention_modules, stream
from calib.capture.reservoir import priorities
from calib.capture.sample import SINKS
from calib.capture.shape import Shape
from calib.errors import RunError
from calib.runtime.attention import exact_attention
from calib.runtime.logits import Logits
from calib.runtime.rotation import Rotation
from calib.statistics.transformed_streams import coded, unrotated
from calib.statistics.vector_samples import VectorSamples

TOKENS = 40


def batch(rows: int = 2, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 259, (rows, TOKENS), generator=generator)
    mask = torch.ones(rows, TOKENS, dtype=torch.bool)
    mask[0, :padding] = False
    return tokens, mask, torch.arange(rows * TOKENS).view(rows, TOKENS)


def captured(model, tokens, mask, index, begins=None):
    samples = []
    stream(model, tokens, mask, index, samples.append, begins)
    return samples


def eager_cache(kind: str, tokens, mask) -> DynamicCache:
    """The keys and values that transformers' own eager attention leaves in its cache; window layers are not cut."""
    model = toy_model(kind)
    model.set_attn_implementation("eager")
    cache = DynamicCache()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    model(tokens, attention_mask=mask.long(), position_ids=positions, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("padding", [0, 7])
def test_keys_and_values_are_those_of_eager_attention(kind, padding):
    tokens, mask, index = batch(padding=padding)
    samples = captured(toy_model(kind), tokens, mask, index)
    cache = eager_cache(kind, tokens, mask)
    assert [sample.layer for sample in samples] == [0, 1, 2]
    # A layer's input depends on all attention before it, so the last layer also checks masks, windows, softcap and scaling.
    for sample, layer in zip(samples, cache.layers, strict=True):
        for mine, theirs in ((sample.keys, layer.keys), (sample.values, layer.values)):
            assert mine.shape == (2, 2, TOKENS, 32)
            torch.testing.assert_close(mine.transpose(1, 2)[mask], theirs.transpose(1, 2)[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_keys_before_rope_become_keys_by_the_models_own_rotation(kind):
    model = toy_model(kind)
    tokens, mask, index = batch(padding=5)
    for sample, module in zip(captured(model, tokens, mask, index), attention_modules(model), strict=True):
        rotary = model.base_model.rotary_emb
        kinds = (module.layer_type,) if isinstance(rotary, Gemma3RotaryEmbedding) else ()
        cos, sin = rotary(sample.keys, sample.positions, *kinds)
        _, rotated = apply_rotary_pos_emb(sample.queries, sample.keys_before_rope, cos, sin)
        torch.testing.assert_close(rotated, sample.keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("lfm2", {"layer_types": ["full_attention"] * 3}),
        ("stablelm", {"qk_layernorm": True, "hidden_size": 128}),
        ("hunyuan_v1_dense", {}),
    ],
)
def test_vectors_of_dictionaries_are_the_keys_of_a_cache_whatever_a_model_calls_its_key_norm(model_type, settings):
    """HunYuan normalises keys after RoPE, so that the unrotated keys of a cache are no module's output."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | settings)).eval()
    for name, parameter in model.named_parameters():
        if "layernorm.weight" in name or "layernorm.norms" in name:
            parameter.data.uniform_(0.5, 2)
    rotation, kept = (
        Rotation.of(model, ""),
        VectorSamples(Shape.of(model), 0, 10_000, torch.float32, lambda: rotation),
    )
    order = priorities(0, torch.arange(2 * 2 * TOKENS)).argsort()
    expected = {}

    def sink(sample):
        kept.observe(sample)
        expected[sample.layer] = unrotated(sample.keys, sample.positions, rotation).transpose(1, 2).flatten(0, 2)[order]

    stream(model, *batch(), sink)
    assert len(expected) == 3
    for layer, keys in expected.items():
        torch.testing.assert_close(kept.vectors(layer)["keys"], keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_may_begin_anywhere(kind):
    """Rows with positions that begin above 0: keys before RoPE and values are the same, and keys are rotated by those positions."""
    model = toy_model(kind)
    tokens, mask, index = batch(padding=5)
    begins = torch.tensor([100, 3])
    rows = zip(captured(model, tokens, mask, index), captured(model, tokens, mask, index, begins), strict=True)
    for (here, there), module in zip(rows, attention_modules(model), strict=True):
        assert torch.equal(there.positions, here.positions + begins[:, None]) and torch.equal(
            there.numbers, here.positions
        )
        assert torch.equal(coded(there), coded(here)) and int((mask & ~coded(there)).sum()) == 2 * SINKS
        for stream_name in ("keys_before_rope", "values"):
            one, other = (getattr(sample, stream_name).transpose(1, 2)[mask] for sample in (here, there))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        rotary = model.base_model.rotary_emb
        kinds = (module.layer_type,) if isinstance(rotary, Gemma3RotaryEmbedding) else ()
        cos, sin = rotary(here.keys, there.positions, *kinds)
        _, rotated = apply_rotary_pos_emb(there.queries, there.keys_before_rope, cos, sin)
        torch.testing.assert_close(rotated, there.keys, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_nothing_of_a_layer_is_held_when_the_next_one_comes():
    alive = []

    def sink(sample):
        gc.collect()
        assert all(reference() is None for reference in alive), "an earlier layer's keys are still in memory"
        alive.extend(weakref.ref(x) for x in (sample, sample.queries, sample.keys, sample.values))

    stream(toy_model(), *batch(), sink)
    assert len(alive) == 12


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_afterwards_as_it_was(fails):
    model = toy_model("qwen3")
    model.model.layers[1].train()  # a mixed state must survive too
    before = {name: module.training for name, module in model.named_modules()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}

    def sink(sample):
        assert model.config._attn_implementation == NAME
        if fails and sample.layer == 1:
            raise KeyError("sink")

    if fails:
        with pytest.raises(KeyError, match="sink"):
            stream(model, *batch(), sink)
    else:
        stream(model, *batch(), sink)
    assert model.config._attn_implementation == "sdpa"
    assert {name: module.training for name, module in model.named_modules()} == before
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("projection", "named"), [("q_proj", "queries"), ("k_proj", "keys"), ("v_proj", "values")])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_activations_name_layer_and_stream(projection, named, bad):
    model = toy_model()
    getattr(model.model.layers[1].self_attn, projection).weight[3, 5] = bad
    with pytest.raises(RunError, match=f"layer 1 {named}: NaN or infinite"):
        stream(model, *batch(), lambda sample: None)


def test_what_stands_in_the_padding_does_not_matter():
    model, (tokens, mask, index) = toy_model(), batch(padding=6)
    other = tokens.clone()
    other[0, :6] = 77
    for one, two in zip(captured(model, tokens, mask, index), captured(model, other, mask, index), strict=True):
        assert torch.equal(one.keys.transpose(1, 2)[mask], two.keys.transpose(1, 2)[mask])
        assert not torch.equal(one.keys, two.keys)


def test_a_padded_row_is_measured_like_the_row_alone():
    model, (tokens, mask, index) = toy_model("mistral"), batch(padding=9)
    together = captured(model, tokens, mask, index)
    alone = captured(model, tokens[:1, 9:], mask[:1, 9:], index[:1, 9:])
    for sample, single in zip(together, alone, strict=True):
        row, other = sample.without_padding()
        assert bool(row.mask.all())
        assert torch.equal(row.positions, single.positions)
        assert torch.equal(row.index, single.index)
        for name in ("queries", "keys", "keys_before_rope", "values"):
            torch.testing.assert_close(getattr(row, name), getattr(single, name), rtol=1e-4, atol=1e-5)
        assert other.keys.shape[2] == TOKENS


def test_softcap_arithmetic_equals_a_loop():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 6, 4, generator=generator, dtype=torch.float64) for heads in (2, 1, 1))
    found = exact_attention(q.float(), k.float(), v.float(), None, Logits(0.5, softcap=1.5, sliding=3))
    for head in range(2):
        for t in range(6):
            logits = [1.5 * torch.tanh((q[0, head, t] @ k[0, 0, s]) * 0.5 / 1.5) for s in range(max(0, t - 2), t + 1)]
            weights = torch.softmax(torch.stack(logits), 0)
            expected = sum(w * v[0, 0, s] for w, s in zip(weights, range(max(0, t - 2), t + 1), strict=True))
            torch.testing.assert_close(found[0, head, t].double(), expected, rtol=1e-5, atol=1e-6)


def test_outside_a_capture_the_attention_function_refuses():
    model = toy_model()
    model.config._attn_implementation_internal = NAME
    with pytest.raises(RunError, match="only while a capture runs"):
        model(torch.tensor([[5, 6, 7]]))
