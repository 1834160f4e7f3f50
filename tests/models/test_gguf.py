"""Models in GGUF files: commands take them like folders, and a converted model has the same logits and tokens as the file."""

import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

gguf = pytest.importorskip("gguf", reason="needs the package gguf")  # not with the oldest releases

from tiny_gguf import TEMPLATE, TOKENS, save_gguf, tiny_model  # noqa: E402
from toy_language_model import save_text  # noqa: E402

from calib.capture import model_files  # noqa: E402
from calib.capture.gguf_tokens import without_unnamed_tokens  # noqa: E402
from calib.capture.language_model import load  # noqa: E402
from calib.capture.model_files import ModelFiles, model_name  # noqa: E402
from calib.cli import main  # noqa: E402
from calib.convert import gguf as conversion  # noqa: E402
from calib.errors import RunError  # noqa: E402
from calib.runtime import Artifact, compress  # noqa: E402

KINDS = ["llama", "qwen2"]
IDS = torch.arange(3, 60)[None]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@torch.no_grad()
def test_weights_tokenizer_and_template_are_the_files(tmp_path, kind):
    model = save_gguf(tmp_path / "tiny.gguf", kind)
    found, tokenizer = load(str(tmp_path / "tiny.gguf"), "float32")
    assert torch.allclose(found(IDS).logits, model(IDS).logits, atol=1e-6)
    assert tokenizer("the th<|end|>").input_ids == [*map(TOKENS.index, ("the", "Ġ", "th", "<|end|>"))]
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|end|>"
    assert not found.is_quantized and not hasattr(found.config, "quantization_config")
    assert model_name(str(tmp_path / "tiny.gguf")) == "tiny"


@torch.no_grad()
def test_quantised_weights_are_dequantised(tmp_path):
    save_gguf(tmp_path / "tiny.gguf", quantised=True)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight")
    assert stored.tensor_type == gguf.GGMLQuantizationType.Q8_0
    found, _ = load(str(tmp_path / "tiny.gguf"), "float32")
    expected = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
    assert torch.equal(found.model.layers[0].mlp.up_proj.weight, expected)


@torch.no_grad()
def test_a_converted_folder_is_the_file(tmp_path, capsys, kind):
    """Logits and tokens of the converted folder are the file's. (Qwen2's own tokenizer class would rebuild the tokenizer from files
    that a GGUF file does not contain.)"""
    save_gguf(tmp_path / "tiny.gguf", kind, quantised=True)
    assert main(["convert", "gguf", str(tmp_path / "tiny.gguf"), str(tmp_path / "plain")]) == 0
    assert f"next: calib fit --model.path {tmp_path / 'plain'}" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    source, own = load(str(tmp_path / "tiny.gguf"), "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert torch.equal(model(IDS).logits, source(IDS).logits)
    for text in conversion.texts(own):
        assert tokenizer(text).input_ids == own(text).input_ids
    assert tokenizer.chat_template == own.chat_template


@pytest.mark.full
def test_it_is_planned_fitted_and_generates(tmp_path, capsys):
    save_gguf(tmp_path / "tiny.gguf")
    save_text(tmp_path / "text.txt")
    path, artifact = str(tmp_path / "tiny.gguf"), str(tmp_path / "tiny.safetensors")
    words = [f"--model.path={path}", f"--data.text={tmp_path / 'text.txt'}", f"--output={artifact}", "--data.length=64",
             "--data.sequences=4", "--data.heldout_sequences=2", "--data.batch_size=1", "--trainer.logger=false",
             "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]  # fmt: skip
    assert main(["fit", *words, "--plan"]) == 0
    assert main(["fit", *words]) == 0
    assert main(["generate", "--model", path, "--artifact", artifact, "--prompt", "the", "--method", "klt"]) == 0
    model, _ = load(path, "float32")
    with compress(model, "kivi", Artifact.load(artifact)):
        pass
    assert "tiny" in capsys.readouterr().out


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def no_gguf(data: bytes) -> bytes:
    return b"GGML" + data[4:]


def many_tensors(data: bytes) -> bytes:
    return data[:8] + struct.pack("<Q", 2**60) + data[16:]


@pytest.mark.full
@pytest.mark.parametrize("damage", [cut, no_gguf, many_tensors])
@pytest.mark.parametrize("command", ["convert", "plan", "generate"])
def test_a_damaged_file_is_one_line(tmp_path, capsys, command, damage):
    save_gguf(tmp_path / "whole.gguf")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damage((tmp_path / "whole.gguf").read_bytes()))
    words = {
        "convert": ["convert", "gguf", str(path), str(tmp_path / "plain")],
        "plan": ["fit", "--plan", f"--model.path={path}"],
        "generate": ["generate", "--model", str(path), "--method", "kivi", "--prompt", "the"],
    }[command]
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "tiny.gguf" in error[0], error
    assert not (tmp_path / "plain").exists()


@torch.no_grad()
def test_without_a_head_the_embeddings_are_tied(tmp_path, kind):
    model = save_gguf(tmp_path / "tiny.gguf", kind, without=("lm_head.weight",))
    model.lm_head.weight = model.model.embed_tokens.weight
    assert main(["convert", "gguf", str(tmp_path / "tiny.gguf"), str(tmp_path / "plain")]) == 0
    for path in (tmp_path / "tiny.gguf", tmp_path / "plain"):
        found, _ = load(str(path), "float32")
        assert found.config.tie_word_embeddings and torch.allclose(found(IDS).logits, model(IDS).logits, atol=1e-6)


def ends(model):
    return [(of.bos_token_id, of.eos_token_id) for of in (model.config, model.generation_config)]


def test_without_first_and_last_tokens_the_model_has_none(tmp_path, kind):
    """Not 1 and 2, the ids of a LlamaConfig, which are letters here."""
    save_gguf(tmp_path / "tiny.gguf", kind, ends=False)
    assert main(["convert", "gguf", str(tmp_path / "tiny.gguf"), str(tmp_path / "plain")]) == 0
    for path in (tmp_path / "tiny.gguf", tmp_path / "plain"):
        assert ends(load(str(path), "float32")[0]) == 2 * [(None, None)]
    save_gguf(tmp_path / "named.gguf", kind)
    assert ends(load(str(tmp_path / "named.gguf"), "float32")[0]) == 2 * [
        (TOKENS.index("<|start|>"), TOKENS.index("<|end|>"))
    ]


@pytest.mark.parametrize(("tokenizer", "expected"), [("llama", (1, 2)), ("gpt2", (None, None))])
def test_a_sentencepiece_file_need_not_name_them(tmp_path, tokenizer, expected):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model(tokenizer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model, silent = tiny_model("llama"), SimpleNamespace(bos_token_id=None, eos_token_id=None)
    without_unnamed_tokens(ModelFiles("a.gguf", str(tmp_path), "a.gguf", True), silent, model)
    assert ends(model) == 2 * [expected]


def test_a_missing_weight_is_one_line(tmp_path, capsys):
    save_gguf(tmp_path / "tiny.gguf", without=("model.layers.1.mlp.up_proj.weight",))
    assert main(["convert", "gguf", str(tmp_path / "tiny.gguf"), str(tmp_path / "plain")]) == 2
    error = capsys.readouterr().err
    assert "tiny.gguf' lacks model.layers.1.mlp.up_proj.weight of its configuration" in error and error.count("\n") == 1
    assert not (tmp_path / "plain").exists()


def factors(*values: float):
    return lambda writer: writer.add_tensor(
        "rope_freqs.weight", np.array([values[0]] * 12 + [values[-1]] * 4, np.float32)
    )


SCALED = {
    "llama.rope.scaling.type is linear": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
    "the tensor rope_freqs.weight": factors(1.0, 8.0),  # as of Llama 3.1
}


@pytest.mark.parametrize("found", SCALED)
@pytest.mark.parametrize(
    "words", [["fit", "--plan", "--model.path"], ["generate", "--prompt", "the", "--method", "rtn", "--model"]]
)
def test_rope_that_transformers_would_not_scale_is_refused(tmp_path, capsys, found, words):
    save_gguf(tmp_path / "tiny.gguf", more=SCALED[found])
    assert main([*words, str(tmp_path / "tiny.gguf")]) == 2
    error = capsys.readouterr().err
    assert f"scales RoPE ({found}), which transformers does not read" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "more", [lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE), factors(1.0)], ids=["none", "ones"]
)
def test_rope_that_is_not_scaled_is_read(tmp_path, more):
    save_gguf(tmp_path / "tiny.gguf", more=more)
    load(str(tmp_path / "tiny.gguf"), "float32")


def test_what_is_no_gguf_file(tmp_path, capsys):
    (tmp_path / "weights.bin").write_bytes(b"x")
    for words, line in (
        (["convert", "gguf", str(tmp_path), str(tmp_path / "plain")], "is no .gguf file; name the file itself"),
        (
            ["convert", "gguf", str(tmp_path / "none.gguf"), str(tmp_path / "plain")],
            "is no .gguf file; name the file itself",
        ),
        (["fit", f"--model.path={tmp_path / 'weights.bin'}"], "is no folder, no .gguf file and no hub name"),
        (["fit", f"--model.path={tmp_path / 'none.gguf'}"], "is no folder, no .gguf file and no hub name"),
    ):
        assert main(words) == 2
        assert line in capsys.readouterr().err


def test_without_the_package_one_line_says_so(tmp_path, capsys, monkeypatch):
    save_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(model_files.importlib.util, "find_spec", lambda name: None)
    assert main(["fit", "--plan", f"--model.path={tmp_path / 'tiny.gguf'}"]) == 2
    assert "which needs gguf and accelerate: pip install 'calib-kv[gguf]'" in capsys.readouterr().err


def forgets_merges(own: PreTrainedTokenizerFast) -> None:
    content = json.loads(own.backend_tokenizer.to_str())
    content["model"]["merges"] = []
    own._tokenizer = own.backend_tokenizer.from_str(json.dumps(content))


def forgets_the_template(own: PreTrainedTokenizerFast) -> None:
    own.chat_template = None


def forgets_the_end(own: PreTrainedTokenizerFast) -> None:
    own.eos_token = "<|start|>"


@pytest.mark.parametrize(
    ("forgets", "line"),
    [
        (forgets_merges, "the written tokenizer reads .Hello, world!"),
        (forgets_the_template, "its tokenizer has the chat template"),
        (forgets_the_end, "its tokenizer has the special tokens"),
    ],
)
def test_a_tokenizer_that_does_not_come_back_is_told_and_leaves_nothing(tmp_path, monkeypatch, forgets, line):
    save_gguf(tmp_path / "tiny.gguf")
    plain = conversion.plain_tokenizer

    def forgetful(tokenizer):
        written = plain(tokenizer)
        forgets(written)
        return written

    monkeypatch.setattr(conversion, "plain_tokenizer", forgetful)
    with pytest.raises(RunError, match=line):
        conversion.convert(tmp_path / "tiny.gguf", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
