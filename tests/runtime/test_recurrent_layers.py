"""Models of attention and recurrent layers (Qwen3-Next, LFM2, Granite 4): states stay as transformers keeps them."""

import copy

import pytest
import torch
from toy_models import COMMON, HEADS_4_2_32, generate, left_padded
from transformers import (
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from calib.runtime import PrefixError, compress
from calib.runtime.memory import measure, tensors

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
}
CONVOLUTIONS = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}


@pytest.fixture(params=["states", "convolutions"])
def model(request):
    torch.manual_seed(7)
    if request.param == "states":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**{**COMMON, **HEADS_4_2_32, **LINEAR})).eval()
    return Lfm2ForCausalLM(Lfm2Config(**{**COMMON, **CONVOLUTIONS})).eval()


@pytest.fixture
def convolutional(model):
    if not isinstance(model, Lfm2ForCausalLM):
        pytest.skip("its states cannot be taken back")
    return model


@pytest.fixture
def with_states(model):
    if isinstance(model, Lfm2ForCausalLM):
        pytest.skip("convolutions alone")
    return model


def test_a_layer_with_a_state_beside_its_keys_is_refused_for_that():
    """Its attention could be compressed: the refusal names the recurrent state, which each of its layers has as well."""
    states = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    model = FalconH1ForCausalLM(FalconH1Config(**{**COMMON, **HEADS_4_2_32, **states}))
    with pytest.raises(ValueError, match="FalconH1ForCausalLM has a recurrent state in every attention layer"):
        compress(model, "full")


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 16}], ids=str
)
def test_full_gives_the_tokens_of_the_dynamic_cache(model, options):
    inputs = left_padded([60, 60])
    expected = generate(model, inputs, DynamicCache(config=model.config), **options)
    with compress(model, "full") as cache:
        found = generate(model, inputs, cache, **options)
    assert torch.equal(found.sequences, expected.sequences)


def logits_of(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def test_rows_are_selected_and_repeated_with_their_states(model):
    ids, following = left_padded([60, 60])["input_ids"], torch.tensor([[5], [9]])
    with compress(model, "full") as cache:
        logits_of(model, cache, ids)
        branch = copy.deepcopy(cache)
        expected = logits_of(model, branch, following)[:, -1]
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 2]))
        found = logits_of(model, cache, following[[1, 0, 1]])[:, -1]
    torch.testing.assert_close(found, expected[[1, 0, 1]])


def test_an_emptied_cache_takes_another_batch(model):
    ids = left_padded([60])["input_ids"]
    with compress(model, "full") as cache:
        expected = logits_of(model, cache, ids), logits_of(model, cache, ids[:, :1])
        cache.reset()
        logits_of(model, cache, left_padded([40, 40, 40], seed=3)["input_ids"])
        cache.reset()
        found = logits_of(model, cache, ids), logits_of(model, cache, ids[:, :1])
    assert all(map(torch.equal, found, expected))


def test_states_are_measured_and_counted_as_the_dynamic_cache_would_hold_them(model):
    inputs, other = left_padded([60, 60]), DynamicCache(config=model.config)
    logits_of(model, other, inputs["input_ids"])
    with compress(model, "full") as cache:
        logits_of(model, cache, inputs["input_ids"])
        memory, states = cache.memory(), measure(cache.layers[0])
    assert memory.by_kind["uncompressed"] == states > 0
    assert memory.dynamic_bytes == measure(other)
    assert memory.predicted_bytes == memory.measured_bytes
    assert str(memory).endswith("; 1 of 2 layers are compressed, the others stay as transformers keeps them")


def test_a_cache_moves_with_its_states(model):
    ids = left_padded([60])["input_ids"]
    with compress(model, "full") as cache:
        logits_of(model, cache, ids)
        expected = logits_of(model, copy.deepcopy(cache), ids[:, :1])
        cache.to("meta")
        assert {part.device.type for part in tensors(cache.layers[0])} == {"meta"}
        cache.reset()
        logits_of(model, cache, ids)
        found = logits_of(model, cache.to("cpu"), ids[:, :1])
    assert torch.equal(found, expected)


def test_drafts_over_convolutions_leave_no_trace(convolutional):
    model = convolutional
    inputs = {"input_ids": left_padded([30])["input_ids"].repeat(1, 4)}
    expected = generate(model, inputs, DynamicCache(config=model.config))
    with compress(model, "full") as cache:
        found = generate(model, inputs, cache, prompt_lookup_num_tokens=4)
    assert torch.equal(found.sequences, expected.sequences)


def test_tokens_are_not_taken_back_from_a_state(with_states):
    model = with_states
    with compress(model, "full") as cache:
        cache.activate_past_recording()
        logits_of(model, cache, left_padded([60])["input_ids"])
        with pytest.raises(ValueError, match=r"copy\.deepcopy") as error:
            cache.crop(-3)
        assert "\n" not in str(error.value)
        cache.crop(0)
        assert cache.get_seq_length() == 60


@pytest.mark.full
def test_speculation_is_refused_in_a_line(model):
    with pytest.raises(ValueError, match="pass speculative=False") as error:
        compress(model, "specache", k=16)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == "sdpa"
    inputs = left_padded([60, 60])
    with compress(model, "specache", k=16, residual=32, speculative=False) as cache:
        assert generate(model, inputs, cache).sequences.shape[1] == 84


def test_such_a_cache_is_not_saved(model, tmp_path):
    with compress(model, "full") as cache:
        logits_of(model, cache, left_padded([60])["input_ids"])
        with pytest.raises(PrefixError, match=r"cannot be saved: .*LinearAttentionLayer"):
            cache.save(tmp_path / "x.safetensors")
