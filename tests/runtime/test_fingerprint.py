"""Which models an artifact accepts: every field of the fingerprint, weights in every dtype, fine-tuned relatives."""

import pytest
import torch
from toy_artifact import SHAPE, toy_artifact, toy_model
from transformers import AutoModelForCausalLM

from calib.runtime.artifact.artifact import ArtifactError
from calib.runtime.artifact.fingerprint import fingerprint


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_the_fitted_model_is_accepted_in_every_dtype_and_attention(tmp_path, family):
    model = toy_model(family)
    artifact = toy_artifact(model)
    artifact.check(model)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        artifact.check(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager"))


def test_fitted_in_one_half_precision_and_used_in_the_other(tmp_path):
    toy_model().to(torch.bfloat16).save_pretrained(tmp_path)  # as most checkpoints are published
    by_dtype = {
        dtype: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    for fitted in by_dtype.values():
        artifact = toy_artifact(fitted)
        for used in by_dtype.values():
            artifact.check(used)


def test_fingerprinting_leaves_the_model_alone():
    model = toy_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    assert fingerprint(model) == fingerprint(model)
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_padding_attention_and_other_volatile_fields_do_not_matter():
    model = toy_model()
    artifact = toy_artifact(model)
    model.config.pad_token_id = 3
    model.config.use_cache = False
    model.config._name_or_path = "elsewhere"
    model.set_attn_implementation("eager")
    artifact.check(model)


@pytest.mark.parametrize(
    ("changes", "field", "found", "expected"),
    [
        ({"num_hidden_layers": 3, "num_key_value_heads": 1}, "layers", "3", "2"),
        ({"num_key_value_heads": 4, "vocab_size": 65}, "kv_heads", "4", "2"),
        ({"head_dim": 16, "num_attention_heads": 2}, "head_dim", "16", "8"),
        ({"num_attention_heads": 2, "vocab_size": 65}, "heads", "2", "4"),
        ({"vocab_size": 65, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "vocab_size", "65", "64"),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rms_norm_eps": 1e-5},
            "rope",
            "rope_theta = 500000.0",
            "rope_theta = 10000.0",
        ),
        ({"rms_norm_eps": 1e-5, "seed": 1}, "config_hash", "rms_norm_eps = 1e-05", "rms_norm_eps = 1e-06"),
        ({"seed": 1}, "weights", "", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_another_model_is_refused_at_the_first_field_that_differs(changes, field, found, expected):
    artifact = toy_artifact()
    with pytest.raises(ArtifactError, match=rf"^{field} differ") as caught:
        artifact.check(toy_model(**changes))
    assert f"this model has {found}, the artifact expects {expected};" in str(caught.value) or field == "weights"
    assert "calib fit" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_architecture_is_named_first():
    with pytest.raises(
        ArtifactError, match=r"^architecture differs: this model has mistral, the artifact expects llama"
    ):
        toy_artifact().check(toy_model("mistral", num_hidden_layers=3))


def test_a_finetuned_relative_is_refused_unless_allowed():
    model = toy_model()
    artifact = toy_artifact(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(1.02)
    with pytest.raises(ArtifactError, match=r"fine-tuned relative.*allow_finetuned=True"):
        artifact.check(model)
    artifact.check(model, allow_finetuned=True)
    with pytest.raises(ArtifactError, match=r"^layers differ"):
        artifact.check(toy_model(num_hidden_layers=3), allow_finetuned=True)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_every_layer_and_both_projections_are_in_the_weights_hash(projection, layer):
    model = toy_model()
    before = fingerprint(model)["weights"]
    with torch.no_grad():
        getattr(model.model.layers[layer].self_attn, projection).weight[0, 0] += 1  # the first row is always sampled
    after = fingerprint(model)["weights"]
    assert all(before[name] != after[name] for name in ("float32", "float16", "bfloat16"))


def test_unreadable_weights_are_never_taken_for_equal():
    model = toy_model()
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(torch.empty(16, 32, device="meta"))
    assert set(fingerprint(model)["weights"].values()) == {None}
    with pytest.raises(ArtifactError, match="weights of this model cannot be compared"):
        toy_artifact().check(model)
    with pytest.raises(ArtifactError, match="cannot be compared"):
        toy_artifact(model).check(model)
    toy_artifact(model).check(model, allow_finetuned=True)


def test_a_fused_projection_is_sampled():
    model = toy_model()
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.W_pack = torch.nn.Linear(32, 64, bias=False)
        del attention.k_proj, attention.v_proj
    before = fingerprint(model)["weights"]["float32"]
    with torch.no_grad():
        model.model.layers[1].self_attn.W_pack.weight[-1] += 1
    assert fingerprint(model)["weights"]["float32"] != before


def test_a_model_without_projections_is_refused():
    model = toy_model()
    for layer in model.model.layers:
        del layer.self_attn.k_proj, layer.self_attn.v_proj
    with pytest.raises(ArtifactError, match="no key and value projections"):
        fingerprint(model)


def test_head_dim_and_kv_heads_are_derived_where_the_configuration_is_silent():
    config = {key: value for key, value in SHAPE.items() if key not in ("head_dim", "num_key_value_heads")}
    model = toy_model(head_dim=None, num_key_value_heads=None)
    found = fingerprint(model)
    assert (found["head_dim"], found["kv_heads"]) == (config["hidden_size"] // 4, 4)


def test_a_limit_that_is_none_is_written_as_a_word():
    """`time_step_limit` of Mamba 2 layers (Granite 4, Bamba) may be infinite, for which JSON has no number."""
    model = toy_model()
    model.config.time_step_limit = (0.0, float("inf"))
    assert fingerprint(model)["config"]["time_step_limit"] == [0.0, "inf"]
    toy_artifact(model).check(model)
