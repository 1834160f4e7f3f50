"""`Rotation`, the runtime's RoPE: its angles, the model's own rotation, and the inverse."""

import oracle
import pytest
import torch
from rope_types import ROPE_TYPES
from toy_models import COMMON, HEADS_4_2_32, SLIDING, random_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from calib.kernels.attend.reference import rotated_scores
from calib.runtime import compress
from calib.runtime.rotation import Rotation


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def rotation(model):
    return Rotation.of(model, "use something else")


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 64), (3, 67), (1000, 1300), (131000, 131072)])
def test_angles_along_a_stretch_are_those_of_its_positions(rotation, start, stop):
    """Cosines and sines are those of float64 to half a unit of float32, however far from 0."""
    along = rotation.along(start, stop, torch.device("cpu"))
    one_by_one = rotation.at(torch.arange(start, stop))
    angles = torch.arange(start, stop).double()[:, None] * rotation.frequencies
    for found, other, exact in zip(along, one_by_one, (angles.cos(), angles.sin()), strict=True):
        assert found.shape == (stop - start, len(rotation.frequencies)) and found.dtype == torch.float32
        assert (found - exact).abs().max() <= 6e-8 and (other - exact).abs().max() <= 6e-8
    for found, other in zip(rotation.across(start, stop, torch.device("cpu")), along, strict=True):
        assert found.is_contiguous() and torch.equal(found.mT, other)


def test_keys_turn_as_the_model_turns_them(model, rotation):
    keys = torch.randn(2, 3, 50, 2 * len(rotation.frequencies), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(50)[None]
    theirs = apply_rotary_pos_emb(keys, keys, *model.model.rotary_emb(keys, positions))[1]
    cos, sin = rotation.along(0, 50, keys.device)
    assert torch.allclose(rotation.rotated(keys, cos, sin), theirs, atol=1e-5)
    # The inverse rotation loses some units of float32.
    assert (rotation.rotated(theirs, cos, -sin) - keys).norm() / keys.norm() < 1e-5


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_frequencies_and_factor_are_those_of_the_equations(rope_type):
    """And keys as a model gives them, rotated back, are those of its projection times the factor."""
    parameters, frequencies, factor = ROPE_TYPES[rope_type]
    model = random_model("llama", rope_parameters=parameters)
    rotation = Rotation.of(model, "use something else")
    assert torch.allclose(rotation.frequencies, frequencies, rtol=1e-6) and rotation.scaling == pytest.approx(factor)
    keys = torch.randn(2, 3, 50, 32, generator=torch.Generator().manual_seed(0))
    theirs = apply_rotary_pos_emb(keys, keys, *model.model.rotary_emb(keys, torch.arange(50)[None]))[1]
    back = oracle.rotated(theirs, frequencies, -torch.arange(50).double()[:, None])
    assert (back - factor * keys).norm() / keys.norm() < 1e-5


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("exaone4", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("lara_mini", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
    ],
)
def test_layers_without_rope_are_not_turned(model_type, settings):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("transformers has no such model")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **shape, **heads, **ends, **settings)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"applies no RoPE in layers \[1\]; use something else"):
        Rotation.of(model, "use something else")


@pytest.mark.parametrize("rest", [0, 4])
def test_scores_of_tokens_last_are_those_of_rotated_keys(rotation, rest):
    """To rounding, also where some channels are not rotated."""
    draw = torch.Generator().manual_seed(0)
    cos, sin = rotation.across(5, 55, torch.device("cpu"))
    channels = 2 * len(rotation.frequencies) + rest
    keys, query = (torch.randn(2, 3, n, channels, generator=draw) for n in (50, 6))
    wanted = query.double() @ rotation.rotated(keys, cos.mT, sin.mT).double().mT
    found = rotated_scores(query, keys.mT.contiguous(), cos, sin)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), wanted, atol=2e-5)


def test_positions_of_any_shape(rotation):
    positions = torch.randint(0, 5000, (2, 3, 7))
    cos, sin = rotation.at(positions)
    assert cos.shape == sin.shape == (2, 3, 7, len(rotation.frequencies))
    assert torch.equal(cos[1, 2, 3], rotation.at(positions[1, 2, 3])[0])


def test_a_rotation_of_one_tensor_at_a_time():
    """Gemma 4 rotates queries and keys in two calls. No token leaves StreamingLLM's window, so tokens are the exact cache's."""
    kinds = {"sliding_window": SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma4TextConfig(
        **COMMON | HEADS_4_2_32 | kinds, num_kv_shared_layers=0, vocab_size_per_layer_input=101, per_layer_config=None
    )
    torch.manual_seed(4)
    model, ids = Gemma4ForCausalLM(config).eval(), torch.arange(2, 92)[None]
    expected = model.generate(ids, past_key_values=DynamicCache(config=config), max_new_tokens=8)
    with compress(model, "streaming_llm") as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=8), expected)


def test_the_rotation_of_an_image_encoder_is_not_the_decoders(model, rotation):
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    seeing = LlavaForConditionalGeneration(LlavaConfig(text_config=model.config, vision_config=vision))
    assert torch.equal(Rotation.of(seeing, "use something else").frequencies, rotation.frequencies)


def test_positions_of_several_axes():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(text_config=COMMON | HEADS_4_2_32 | {"rope_parameters": rope}, vision_config=vision)
    with pytest.raises(ValueError, match=r"positions of several axes \(M-RoPE\).*; use something else"):
        Rotation.of(Qwen2VLForConditionalGeneration(config), "use something else")
