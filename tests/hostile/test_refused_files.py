"""Malformed files given to each command that reads a file: one line and status 2."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from toy_artifact import toy_artifact
from toy_language_model import save_toy

from calib.cli import main

FIT = [
    "fit", "--output=x.safetensors", "--data.length=64", "--data.sequences=2", "--data.heldout_sequences=1",
    "--trainer.logger=false", "--trainer.accelerator=cpu", "--model.dictionary.atoms=0",
]  # fmt: skip
ARTIFACTS = {
    "inspect": ["inspect", "bad.file"],
    "inspect --json": ["inspect", "bad.file", "--json"],
    "generate": ["generate", "--artifact=bad.file", "--method=kivi", "--prompt=x"],
    "tune": ["tune", "--artifact=bad.file", "--method=kivi", "--bits=2"],
    "export onnx": ["export", "--format=onnx", "--artifact=bad.file", "--method=kivi", "--output=graphs"],
    "export fp8": ["export", "--format=compressed-tensors", "--artifact=bad.file", "--model=MODEL", "--output=out"],
    "eval": ["eval", "--config=eval/quick.yaml", "--artifact=bad.file", "--model=MODEL"],
}
OTHERS = {
    "fit": [*FIT, "--model.path=MODEL", "--data.text=bad.file"],
    "eval": ["eval", "--config=eval/quick.yaml", "--compare=bad.file", "--model=MODEL"],
    "eval --compare": ["eval", "--compare", "bad.file", "bad.file"],
    "eval --bench": ["eval", "--config=eval/quick.yaml", "--bench=bad.file", "--model=MODEL"],
    "generate": ["generate", "--model=MODEL", "--prompt-file=bad.file"],
    "inspect": ["inspect", "bad.file"],
}
SIZES = {
    "num_hidden_layers": (-1, 0, 10**9, 1.5, "many"), "num_attention_heads": (0, -4), "num_key_value_heads": (-2, 3, 10**12),
    "head_dim": (0, 10**9), "hidden_size": (-48, 10**12), "vocab_size": (0, 10**15), "intermediate_size": (-1,),
    "max_position_embeddings": (-1, 0, 10**30),
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(capsys, words: list[str], model: Path | str) -> str:
    """Run a command; assert status 2 and one line of calib's without a traceback; return the line."""
    capsys.readouterr()
    assert main([word.replace("MODEL", str(model)) for word in words]) == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("calib: ")]
    assert line.startswith("calib: error: ") and "Traceback" not in error and len(line) < 1000
    return line


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 100, b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
@pytest.mark.parametrize("command", ARTIFACTS)
def test_no_artifact(toy, capsys, command, content):
    if command == "export onnx":
        pytest.importorskip("onnx", reason="the extra `export` (onnx) is not installed")
    Path("bad.file").write_bytes(content)
    assert "bad.file" in refused(capsys, ARTIFACTS[command], toy / "llama")


@pytest.mark.parametrize("form", [[], ["--json"], ["--html=page.html"]])
def test_a_tuned_record_that_is_none(capsys, form):
    """A malformed record of `calib tune` in a good artifact is refused by the commands that interpret it, not by loading."""
    toy_artifact(provenance={"tuned": {"version": 1, "choices": [{"method": "kivi"}]}}).save("bad.file")
    if form == ["--json"]:  # prints the record without interpreting it
        assert main(["inspect", "bad.file", *form]) == 0
    else:
        assert "a choice in provenance.tuned" in refused(capsys, ["inspect", "bad.file", *form], "")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00 no text, no JSON", b"[\xff]"])
@pytest.mark.parametrize("command", OTHERS)
def test_no_text_and_no_run(toy, capsys, command, content):
    Path("bad.file").write_bytes(content)
    told = "the prompt is empty" if command == "generate" and not content else "bad.file"
    assert told in refused(capsys, OTHERS[command], toy / "llama")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SIZES.items() for value in values])
def test_a_model_of_impossible_sizes(toy, capsys, name, value):
    """Impossible sizes in a model's configuration are refused, by transformers or by calib, before the model is built."""
    save_toy(Path("model"))
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {name: value}))
    commands = [
        [*FIT, "--model.path=MODEL", f"--data.text={toy / 'text.txt'}"],
        [*FIT, "--model.path=MODEL", "--plan"],
        ["generate", "--model=MODEL", "--prompt=x"],
    ]
    if find_spec("onnx"):
        commands.append(["export", "--format=onnx", "--model=MODEL", "--method=kivi", "--output=graphs"])
    for words in commands:
        line = refused(capsys, words, "model")
        assert "'model'" in line or "--model model" in line
        if isinstance(value, int):
            assert name in line or "StrictDataclass" in line or "ZeroDivisionError" in line, line
