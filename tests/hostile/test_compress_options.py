"""Wrong arguments of `compress`, unsupported models, and wrong calls of a compressed cache: each raises one line with the value and
a remedy, and leaves model and cache as they were."""

import copy

import pytest
import torch
from cases import calibrated_artifact
from one_line import message, refused
from tolerances import LOGITS
from toy_models import left_padded, random_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    WhisperConfig,
    WhisperForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)

from calib.capture.capture import stream
from calib.errors import RunError
from calib.runtime import Artifact, ArtifactError, compress
from calib.runtime.methods import METHODS


@pytest.fixture
def model():
    return random_model("llama")


WRONG_OPTIONS = [
    ("kivvi", {}, ["'kivvi'", "did you mean 'kivi'?"]),
    (
        "zzz",
        {},
        ["'zzz'", f"(known: {', '.join(sorted(METHODS))})"],
    ),
    ("", {}, ["''", "full, gear, gear_l"]),
    (None, {}, ["None", "full, gear, gear_l"]),
    (["kivi"], {}, ["['kivi']"]),
    ("kivi", {"bit": 2}, ["'bit'", "did you mean 'bits'?"]),
    ("kivi", {"window": 64}, ["'window'", "known: bits, group, residual, statistics, clip"]),
    ("rtn", {"group": 32}, ["'group'", "known: bits, statistics, clip"]),
    ("full", {"bits": 4}, ["'bits'", "'full'", "corrections"]),
    *(
        (method, {"bits": bits}, ["bits", "1 ... 8", repr(bits)])
        for method in ("kivi", "rtn")
        for bits in (0, 9, -2, 2.5, 2.0, "two", "2", None, True, [2])
    ),
    *(
        (method, {"bits": bits}, ["bits", *parts])
        for method in ("kivi", "rtn")
        for bits, parts in (
            ({"keys": 4}, ["{keys: ..., values: ...}", "got {'keys': 4}", "name both"]),
            ({"keys": 4, "value": 2}, ["got {'keys': 4, 'value': 2}", "name both"]),
            ({"keys": 4, "values": 9}, ["bits of values must be", "1 ... 8", "got 9"]),
            ({"keys": {"keys": 4, "values": 2}, "values": 2}, ["bits of keys must be", "1 ... 8"]),
            ({"keys": [4], "values": 2}, ["bits of keys must be", "got [4]"]),
        )
    ),
    ("kivi", {"clip": {"keys": 1.5, "values": 1.0}}, ["clip of keys must be a number in (0, 1], got 1.5"]),
    ("kivi", {"group": {"keys": 24, "values": 32}}, ["keys", "24", "divide"]),
    ("kivi", {"group": {"keys": 32, "values": 0}}, ["group of values must be", "got 0"]),
    ("kivi", {"residual": {"keys": 128, "values": 0}}, ["residual of values must be", "got 0", "'rtn'"]),
    ("kivi", {"residual": {"keys": 128, "values": 64}}, ["values would be encoded before the keys"]),
    ("kivi", {"group": 24}, ["24", "divide"]),
    ("kivi", {"group": 64}, ["64 channels", "does not divide 32", "a divisor of 32 as the option group"]),
    ("kivi", {"group": 3}, ["3", "divide"]),
    *(("kivi", {"group": group}, ["group", repr(group)]) for group in (0, -32, 1.5, "32", None, True)),
    *(("kivi", {"residual": size}, ["residual", repr(size), "'rtn'"]) for size in (0, -1, 1.5, "128", None, True)),
    ("kivi", {"residual": 40}, ["40", "32", "residual"]),
    ("kivi", {"residual": 100, "group": 16}, ["100", "16", "residual"]),
    *(
        (method, {"clip": clip}, ["clip", "(0, 1]", repr(clip)])
        for method in ("kivi", "rtn", "zipcache", "mikv")
        for clip in (0, 0.0, 2, 1.0001, -0.5, float("nan"), "0.9", True, [0.9])
    ),
    *(
        (method, {"statistics": word}, ["statistics", "prompt, calibrated", repr(word)])
        for method in ("kivi", "rtn", "zipcache", "mikv")
        for word in ("promt", "", None, 3, ["prompt"])
    ),
    *(
        (method, {name: word}, [name, known, repr(word)])
        for method in ("kivi", "rtn", "specache")
        for name, known in (("basis", "none, hadamard, calibrated"), ("key_bias", "kept, folded"))
        for word in ("pca", "", None, True, 3, ["none"])
    ),
    *(
        (
            method,
            {"basis": "calibrated"},
            ["basis='calibrated'", "needs calibrated rotations", "--model.rotations true"],
        )
        for method in ("kivi", "rtn", "specache")
    ),
    *(
        (method, {"key_bias": "folded"}, ["no bias of keys in layer 0", "key_bias='kept'"])
        for method in ("kivi", "rtn")
    ),
    ("kivi", {"statistics": "calibrated"}, ["'kivi'", "needs an artifact", "Artifact.load"]),
    *(
        (method, {"statistics": "calibrated"}, [f"'{method}'", "needs an artifact", "calib fit"])
        for method in ("rtn", "zipcache", "mikv")
    ),
]


@pytest.mark.parametrize(("method", "options", "parts"), WRONG_OPTIONS, ids=lambda part: str(part)[:40])
def test_wrong_methods_and_options(model, method, options, parts):
    text = refused(model, method, options)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("artifact", ["tiny.calib.safetensors", {}, 5])
def test_an_artifact_must_be_loaded(model, artifact):
    with pytest.raises(ValueError, match=r"artifact must be an Artifact, got .*Artifact\.load") as error:
        compress(model, method="kivi", artifact=artifact)
    assert repr(artifact) in message(error)


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_a_finetuned_relative_is_allowed_or_not(model, wrong):
    with pytest.raises(ValueError, match="allow_finetuned must be True or False, got") as error:
        compress(model, method="kivi", allow_finetuned=wrong)
    message(error)


@pytest.mark.parametrize("seed", ["0", 1.5, None, True])
def test_the_seed_must_be_a_whole_number(model, seed):
    with pytest.raises(ValueError, match="seed must be a whole number, got") as error:
        compress(model, method="kivi", seed=seed)
    message(error)


@pytest.mark.parametrize("method", ["kivi", "rtn", "full"])
@pytest.mark.parametrize(
    ("family", "field"), [("qwen3", "architecture"), ("llama-64", "head_dim"), ("mistral", "architecture")]
)
def test_an_artifact_of_another_model_is_refused(model, method, family, field):
    artifact = calibrated_artifact(random_model(family))
    with pytest.raises(ArtifactError, match=rf"^{field} differs: .*calib fit") as error:
        compress(model, method=method, artifact=artifact)
    message(error)
    assert model.config._attn_implementation != "calib_packed"


def test_a_relative_with_other_weights_needs_a_word(model):
    artifact = calibrated_artifact(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(ArtifactError, match=r"weights differ.*allow_finetuned=True") as error:
        compress(model, method="kivi", artifact=artifact)
    message(error)
    compress(model, method="kivi", artifact=artifact, allow_finetuned=True).release()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"bits": 5}, ["keys", "'32x1'", "5 bits", "calib fit"]),
        ({"group": 16, "residual": 32}, ["keys", "'16x1'", "32x1", "calib fit"]),
    ],
)
def test_a_form_the_artifact_does_not_hold(model, options, parts):
    with pytest.raises(ArtifactError, match="no clip factors") as error:
        compress(model, method="kivi", artifact=calibrated_artifact(model), **options)
    assert all(part in message(error) for part in parts)
    # A given clip needs no clip factors, and so no new fit.
    compress(model, method="kivi", artifact=calibrated_artifact(model), clip=1.0, **options).release()


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ("kivi", "values.scale"),
        ("kivi", "keys.low"),
        ("rtn", "values.high"),
        ("mikv", "keys.balancer"),
        ("zipcache", "keys.low"),
        ("zipcache", "keys.high"),
        ("zipcache", "values.scale"),
    ],
)
def test_a_tensor_the_artifact_does_not_hold(model, method, missing):
    whole = calibrated_artifact(model)
    tensors = {name: tensor for name, tensor in whole.tensors.items() if name != missing}
    artifact = Artifact(tensors, whole.fingerprint, whole.provenance, whole.clip_bits)
    options = {"bits": 2} if method in ("kivi", "rtn") else {}
    with pytest.raises(ArtifactError, match=f"method '{method}' needs tensor '{missing}'.*calib fit") as error:
        compress(model, method=method, artifact=artifact, statistics="calibrated", **options)
    assert str(error.value).startswith("method")


def refused_by_compress_and_fit(model, match):
    tokens = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=match) as error:
        compress(model, method="full")
    message(error)
    with pytest.raises(RunError, match=match) as error:
        stream(model, tokens, tokens.bool(), tokens, lambda sample: None)
    message(error)


# --- models that cannot be compressed -----------------------------------------------------------------------------


def test_a_model_without_the_attention_interface():
    model = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="BloomForCausalLM does not use transformers' attention interface") as error:
        compress(model, method="kivi")
    message(error)


def test_a_model_with_an_encoder():
    shape = {"d_model": 32, "vocab_size": 16, "max_position_embeddings": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = BartForConditionalGeneration(BartConfig(**shape, **heads))
    with pytest.raises(
        ValueError, match=r"BartForConditionalGeneration attends to another sequence.*itself alone"
    ) as error:
        compress(model, method="kivi")
    message(error)


def test_a_decoder_without_its_encoder():
    """WhisperForCausalLM: its configuration does not mention an encoder, but its layers take an encoder's output."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = WhisperForCausalLM(WhisperConfig(vocab_size=60, d_model=16, pad_token_id=0, **sizes))
    with pytest.raises(ValueError, match=r"WhisperForCausalLM attends to another sequence.*itself alone") as error:
        compress(model, method="full")
    message(error)


def test_a_decoder_with_cross_attention():
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=9, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel attends to another sequence.*itself alone") as error:
        compress(GPT2LMHeadModel(GPT2Config(**config.to_diff_dict() | {"add_cross_attention": True})), method="rtn")
    message(error)
    compress(GPT2LMHeadModel(config), method="rtn").release()


def test_latent_attention():
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 9, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 8}
    model = MiniCPM3ForCausalLM(MiniCPM3Config(**shape, **heads))
    with pytest.raises(ValueError, match=r"MiniCPM3ForCausalLM has latent attention \(kv_lora_rank=8\)") as error:
        compress(model, method="rtn")
    message(error)


def test_layers_of_other_shapes():
    """A configuration with settings per layer has no common number of KV heads, and reading it raises."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2))
    model.config.per_layer_config = {1: {"num_key_value_heads": 1}}
    refused_by_compress_and_fit(model, r"has layers with different attention shapes \(num_key_value_heads\)")


def test_layers_that_share_keys_and_values():
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 16, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**shape, **heads, **kinds, num_kv_shared_layers=2)).eval()
    refused_by_compress_and_fit(model, r"of their own \(num_kv_shared_layers=2\)")


def test_a_released_cache(model, cache):
    cache.release()
    with pytest.raises(ValueError, match="this cache was released") as error:
        model(**left_padded([9]), past_key_values=cache)
    message(error)


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded", "dynamic", "paged"])
def test_a_cache_implementation_beside_ours(model, cache, implementation):
    """transformers raises its own error; the test checks that nothing was stored, and that the compressed cache stays usable."""
    with pytest.raises(ValueError, match=r"cache_implementation|continuous batching|paged"):
        model.generate(**left_padded([9]), past_key_values=cache, cache_implementation=implementation, max_new_tokens=3)
    assert cache.get_seq_length() == 0
    assert used_rightly(model, cache)


@pytest.mark.parametrize("name", ["Mamba", "xLSTM"])
def test_a_model_without_attention(name):
    shape = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1}
    config = {"Mamba": MambaConfig(**shape, state_size=4), "xLSTM": xLSTMConfig(**shape, num_heads=2)}[name]
    model = {"Mamba": MambaForCausalLM, "xLSTM": xLSTMForCausalLM}[name](config)
    with pytest.raises(
        ValueError, match=rf"{name}ForCausalLM names no attention heads .*\(num_attention_heads\)"
    ) as error:
        compress(model, method="kivi")
    message(error)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "meta-llama/Llama-2-7b-hf", None])
def test_what_is_no_model_of_transformers(thing):
    with pytest.raises(ValueError, match="model must be a model of transformers, got") as error:
        compress(thing, method="kivi")
    message(error)


def test_attention_sinks_are_refused_not_ignored():
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(config).eval()
    refused_by_compress_and_fit(model, "GptOssForCausalLM has attention sinks as parameters")


def test_attention_in_chunks_is_refused_before_anything_runs():
    shape = {"hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    config = Llama4TextConfig(**shape, **heads, vocab_size=32, pad_token_id=0, attention_chunk_size=16)
    model = Llama4ForCausalLM(config).eval()
    refused_by_compress_and_fit(model, r"attends in chunks \(attention_chunk_size=16\)")


def test_layers_that_share_keys_are_refused_in_a_line_where_no_configuration_tells():
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    shared = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    beside = {
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "intermediate_size": 64,
    }
    config = Gemma3nTextConfig(**shape, **shared, **beside, vocab_size=32, activation_sparsity_pattern=[0.0] * 4)
    model = Gemma3nForCausalLM(config).eval()
    model.config.num_kv_shared_layers = 0
    with (
        compress(model, method="full") as cache,
        pytest.raises(ValueError, match="keys and values of another") as error,
    ):
        model(torch.ones(1, 4, dtype=torch.long), past_key_values=cache)
    message(error)


def test_a_model_that_takes_what_is_cached_apart_is_refused_in_a_line():
    model = DiffLlamaForCausalLM(
        DiffLlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            pad_token_id=0,
        )
    ).eval()
    with compress(model, method="full") as cache, pytest.raises(TypeError, match="is no tensor for 'chunk'") as error:
        model(torch.ones(1, 4, dtype=torch.long), past_key_values=cache)
    message(error)


# --- requests at run time -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(model):
    with compress(model, method="kivi", residual=32) as cache:
        yield cache


def used_rightly(model, cache) -> bool:
    """Whether the cache still generates the same tokens as a new one, after a refused call."""
    inputs = left_padded([20, 40], seed=4)
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    with compress(model, method="kivi", residual=32) as fresh:
        expected = model.generate(**inputs, past_key_values=fresh, max_new_tokens=4, do_sample=False)
    return torch.equal(found, expected)


def test_output_attentions(model, cache):
    with pytest.raises(ValueError, match=r"output_attentions=True.*leave it False") as error:
        model(**left_padded([9]), past_key_values=cache, output_attentions=True)
    message(error)
    assert used_rightly(model, cache)


def test_a_cache_that_is_not_to_be_used(model, cache):
    """generate() would store the whole text at every step."""
    with pytest.raises(ValueError, match=r"use_cache=False with a compressed cache: pass use_cache=True") as error:
        model.generate(torch.arange(2, 11)[None], past_key_values=cache, use_cache=False, max_new_tokens=3)
    message(error)
    assert used_rightly(model, cache)


@pytest.mark.parametrize("length", [3, 10, 12, 20, 21])
def test_a_shorter_text_on_a_cache_that_holds_another(length):
    """As in a pipeline's second call: `generate` would drop as many tokens of the text as the cache holds, so none of it would be
    left. If the text is longer than half of the cache, it drops only as many as the text is shorter, and repeats the others."""
    model = random_model("llama")
    with compress(model, "kivi") as cache:
        model.generate(torch.arange(2, 22)[None], past_key_values=cache, max_new_tokens=3)
        with pytest.raises(
            ValueError, match=r"the cache holds 22 columns, and the text has no more: .* cache\.reset\(\)"
        ) as error:
            model.generate(torch.arange(2, 2 + length)[None], past_key_values=cache, max_new_tokens=3)
        assert "\n" not in str(error.value) and cache.get_seq_length() == 22
        cache.reset()
        assert model.generate(torch.arange(2, 2 + length)[None], past_key_values=cache, max_new_tokens=3).shape == (
            1,
            length + 3,
        )


def test_a_4d_mask(model, cache):
    mask = torch.zeros(1, 1, 9, 9)
    with pytest.raises(ValueError, match=r"4-D attention mask.*2-D padding mask") as error:
        model(left_padded([9])["input_ids"], attention_mask=mask, past_key_values=cache)
    message(error)
    assert used_rightly(model, cache)


def test_dropout_in_training_mode():
    model = random_model("llama", attention_dropout=0.1)
    with compress(model, method="kivi", residual=32) as cache:
        model.train()
        with pytest.raises(ValueError, match=r"dropout 0\.1.*model\.eval\(\)") as error:
            model(**left_padded([9]), past_key_values=cache)
        message(error)
        model.eval()
        assert used_rightly(model, cache)


def test_another_batch_on_a_used_cache(model, cache):
    model.generate(**left_padded([9, 9]), past_key_values=cache, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="holds 2 rows and got 1; use a cache for each batch") as error:
        model(left_padded([30])["input_ids"], past_key_values=cache)
    message(error)
    cache.reset()
    assert used_rightly(model, cache)


def test_stored_tokens_cannot_be_taken_back(model, cache):
    model(**left_padded([9]), past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot remove 5 tokens, at most the 0 .*activate_past_recording") as error:
        cache.crop(-5)
    message(error)
    with pytest.raises(ValueError, match=r"minus the number of tokens to remove, got 3; say -3") as error:
        cache.crop(3)
    message(error)
    cache.crop(0)
    assert cache.get_seq_length() == 9


def test_only_the_last_forward_can_be_taken_back(model, cache):
    cache.activate_past_recording()
    model(**left_padded([9]), past_key_values=cache)
    model(left_padded([4])["input_ids"], past_key_values=cache)
    with pytest.raises(ValueError, match="cannot remove 5 tokens, at most the 4 of the last forward") as error:
        cache.crop(-5)
    message(error)
    cache.crop(-4)
    assert cache.get_seq_length() == 9 and cache.sequences.lengths == [9]


@pytest.mark.parametrize("wrong", [None, "x", 0.5, float("inf"), torch.tensor([1, 2])])
def test_only_a_number_of_tokens_can_be_taken_back(model, cache, wrong):
    model(**left_padded([9]), past_key_values=cache)
    with pytest.raises(ValueError, match="minus the number of tokens to remove, a whole number, got") as error:
        cache.crop(wrong)
    message(error)


@pytest.mark.parametrize(
    "wrong", [[0], None, [0, 2], [-1], [True, False], [0.0], [], [[0], [1]], 0], ids=lambda wrong: str(wrong)
)
@pytest.mark.parametrize("by", ["batch_select_indices", "reorder_cache"])
def test_rows_are_chosen_by_their_numbers(model, cache, by, wrong):
    inputs = left_padded([9, 200])
    model(**inputs, past_key_values=cache)
    expected = copy.deepcopy(cache)
    asked = wrong if wrong in ([0], None) else torch.tensor(wrong)
    with pytest.raises(
        ValueError, match=r"a tensor of one axis with whole numbers 0 ... 1, at least one, got"
    ) as error:
        getattr(cache, by)(asked)
    message(error)
    step = {
        "input_ids": torch.ones(2, 1, dtype=torch.int64),
        "attention_mask": left_padded([10, 201])["attention_mask"],
    }
    assert torch.equal(model(**step, past_key_values=cache).logits, model(**step, past_key_values=expected).logits)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None, True])
def test_rows_are_repeated_whole_times(model, cache, wrong):
    model(**left_padded([9]), past_key_values=cache)
    with pytest.raises(ValueError, match="repeats must be a whole number, at least 1, got") as error:
        cache.batch_repeat_interleave(wrong)
    message(error)
    assert cache.sequences.lengths == [9]


def test_an_empty_cache_has_no_rows_to_choose(model, cache):
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(3)
    model(**left_padded([9]), past_key_values=cache)
    assert cache.sequences.lengths == [9]


@pytest.mark.parametrize("wrong", ["nowhere", torch.float16, None])
def test_a_cache_moves_to_devices_only(cache, wrong):
    with pytest.raises(ValueError, match="a cache moves to a device, such as 'cpu' or 'cuda:1', got") as error:
        cache.to(wrong)
    message(error)


def test_a_cache_of_a_model_with_fewer_layers(model, cache):
    larger = random_model("llama", num_hidden_layers=len(cache.layers) + 1)
    told = f"this cache has {len(cache.layers)} layers, and a model asks for layer {len(cache.layers)}; use a cache for each"
    with compress(larger, method="kivi"), pytest.raises(ValueError, match=told) as error:
        larger(**left_padded([9]), past_key_values=cache)
    message(error)


def test_the_wrong_cache_while_attached_is_only_exact(model):
    inputs = left_padded([30])
    expected = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits
    with compress(model, method="kivi"):
        found = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits
    assert torch.allclose(found, expected, atol=LOGITS)
