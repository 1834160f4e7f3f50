"""`calib export --format onnx`: the files it writes, their metadata, and one line for methods and options without a graph."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="the extra `export` (onnx) is not installed")

import onnx
import torch
from onnx_graphs import small_artifact

from calib import cli
from calib.runtime.methods import METHODS, build, options_asked

COMMAND = ["export", "--format", "onnx"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "small.calib.safetensors"
    small_artifact().save(path)
    return str(path)


def export(*words):
    return cli.main([*COMMAND, *map(str, words)])


def test_a_layer_becomes_files_that_say_what_they_are(artifact, tmp_path, capsys):
    folder, options = tmp_path / "new" / "graphs", ["--method", "zipcache", "--ratio", "0.5"]
    assert export("--artifact", artifact, *options, "--layer", 1, "--output", folder) == 0
    shown = capsys.readouterr().out
    names = {
        f"layer1.tier{n}.{part}.{kind}.onnx"
        for n in range(4)
        for part in ("keys", "values")
        for kind in ("measure", "encode", "decode")
        # Tiers 2 and 3 hold later blocks, whose key ranges are stored with the codes and not measured before.
        if not (n >= 2 and part == "keys" and kind == "measure")
    }
    assert {path.name for path in folder.iterdir()} == names | {"layer1.attend.onnx"}
    assert all(str(folder / name) in shown for name in names)
    assert "    in  values float [batch, 2, tokens, 32]\n" in shown
    assert "    out words int16 [batch, 2, tokens, 8]\n        parameters float16 [batch, 2, tokens, 2]\n" in shown
    assert shown.endswith("23 graphs of 1 layer, opset 18\n")
    for path in folder.iterdir():
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
        said = {entry.key: entry.value for entry in model.metadata_props}
        assert said["calib.graph"] == path.name.removeprefix("layer1.").removesuffix(".onnx")
        assert (said["calib.method"], said["calib.layer"], said["calib.opset"]) == ("zipcache", "1", "18")
        assert json.loads(said["calib.options"]) == json.loads(
            json.dumps(options_asked(build("zipcache", {"ratio": 0.5})))
        )
        assert said["calib.artifact.sha256"] == hashlib.sha256(Path(artifact).read_bytes()).hexdigest()


def test_all_layers_without_an_artifact_and_the_same_bytes_again(tmp_path, capsys):
    from toy_artifact import toy_model

    toy_model(head_dim=32).config.save_pretrained(tmp_path / "model")
    for folder in ("one", "two"):
        assert export("--model", tmp_path / "model", "--method", "rtn", "--bits", 3, "--output", tmp_path / folder) == 0
        assert capsys.readouterr().out.endswith("10 graphs of 2 layers, opset 18\n")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--bit", "3"], 2, "unknown option '--bit' (method 'kivi' has basis, bits"),
        (["--bits", "9", "--clip", "1"], 2, "bits must be a whole number 1 ... 8, got 9"),
        (["--group", "24"], 2, "24"),
        (
            ["--method", "csr", "--online", "64"],
            2,
            "online=64 atoms are sampled from each row's prompt and have no graph",
        ),
        (
            ["--method", "rtn", "--basis", "hadamard"],
            2,
            "in the coordinates of a rotation, which has no graph yet; use",
        ),
        (["--method", "rtn", "--key-bias", "folded"], 2, "folds the bias of keys, which has no graph yet; use"),
        (["--method", "zipcache", "--tiers", "[[16, 1.0]]"], 2, "has no graph; those that have: csr, gear"),
        (["--layer", "2"], 2, "--layer must be 0 ... 1, got 2"),
        (["--layer", "-1"], 2, "--layer must be 0 ... 1, got -1"),
        (["--model", "x"], 2, "give either --artifact FILE or --model FOLDER"),
        (["--artifact", "nope"], 2, "artifact 'nope' is no file"),
    ],
)
def test_a_wrong_request_is_one_line(words, status, text, artifact, tmp_path, capsys):
    given = [] if "--artifact" in words else ["--artifact", artifact]
    assert export(*given, "--output", tmp_path / "out", *words) == status
    shown = capsys.readouterr()
    assert text in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_every_method_has_a_graph_or_is_refused_by_name(artifact, tmp_path, capsys):
    from calib.export.onnx.parts import WITH_GRAPHS

    for name in METHODS:
        status = export("--artifact", artifact, "--method", name, "--layer", 0, "--output", tmp_path / name)
        shown = capsys.readouterr()
        if name in WITH_GRAPHS:
            assert (status, shown.err) == (0, "") and list((tmp_path / name).iterdir())
        else:
            assert status == 2 and f"method '{name}'" in shown.err and ", ".join(WITH_GRAPHS) in shown.err
            assert shown.err.count("\n") == 1 and not (tmp_path / name).exists()


def test_graphs_of_a_layer_are_not_replaced(artifact, tmp_path, capsys, monkeypatch):
    assert export("--artifact", artifact, "--layer", 0, "--output", tmp_path) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("calib.export.onnx.command.write", None)  # refused before anything is computed
        for words in (["--method", "rtn", "--layer", "0"], ["--method", "gear"]):
            assert export("--artifact", artifact, *words, "--output", tmp_path) == 2
            told = capsys.readouterr().err
            assert f"--output {tmp_path}: layer0.attend.onnx exists already; choose a folder without" in told
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert export("--artifact", artifact, "--layer", 1, "--output", tmp_path) == 0  # other layers may be added


def test_what_cannot_be_had_is_said(artifact, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("here")
    assert export("--artifact", artifact, "--output", tmp_path / "file") == 1
    assert "cannot be written" in capsys.readouterr().err
    assert export("--model", tmp_path / "none", "--output", tmp_path / "out") == 2
    assert "is no folder, no .gguf file and no hub name" in capsys.readouterr().err
    assert export("--model", tmp_path, "--output", tmp_path / "out") == 2
    assert "no configuration of a model could be read" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert export("--artifact", artifact, "--output", tmp_path / "out") == 2
    assert "needs the package onnx: pip install 'calib-kv[export]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dictionary_is_in_the_graph_as_the_artifact_has_it(artifact, tmp_path, capsys):
    assert export("--artifact", artifact, "--method", "csr", "--layer", 1, "--output", tmp_path) == 0
    model = onnx.load(tmp_path / "layer1.keys.encode.onnx")
    held = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    atoms = small_artifact().tensor("keys.dictionary")[1]
    assert any(part.shape == atoms.shape and torch.equal(torch.from_numpy(part.copy()), atoms) for part in held)
    assert {entry.key: entry.value for entry in model.metadata_props}["calib.keys"] == "before RoPE"
