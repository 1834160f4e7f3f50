"""Every example runs with its command in examples/README.md, at toy size and in a folder of its own, and prints true figures."""

import importlib.util
import io
import re
import runpy
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "examples" / "README.md").read_text()
COMMANDS = dict(re.findall(r"`(?:python examples/(\w+)\.py)(.*?)`", TABLE))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run each test in an empty folder with links to the checkout's `artifacts` and `examples`."""
    for name in ("artifacts", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(monkeypatch, capsys, name: str, *more: str) -> str:
    """Return what the README's command of example `name` prints, with options `more` that make it small."""
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *shlex.split(COMMANDS[name]), *more])
    capsys.readouterr()
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    return capsys.readouterr().out


def test_the_table_has_every_example():
    assert {path.stem for path in ROOT.glob("examples/*.py")} == COMMANDS.keys()


def test_generate(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "generate")
    answer = re.search(r"the answer to the last line is (\d{4})", out)[1]
    assert f": {answer}\n" in out.split("?\n")[1]  # the answer of the 4-bit cache
    assert "bits per value" in out
    assert "codes" in out  # the prompt is longer than the exact window
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "generate", "--option", "bits=99", "--prompt", "Once")
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: bits must be a whole number 1 ... 8, got 99")


@pytest.mark.full
def test_summarise_batch(monkeypatch, capsys):
    short = ("--max-new-tokens", "12", "--fetch", "16")
    together = run(monkeypatch, capsys, "summarise_batch", *short)
    alone = run(monkeypatch, capsys, "summarise_batch", *short, "--batch-size", "1")
    texts = {path.name: path.read_text() for path in ROOT.glob("examples/texts/*.txt")}
    assert len(texts) == 2
    found = [dict(re.findall(r"^(\S+\.txt)\n    (.+)$", out, re.MULTILINE)) for out in (together, alone)]
    assert found[0].keys() == texts.keys()
    assert found[0] == found[1]  # a row's summary does not depend on the batch it is in
    (both,) = re.findall(r"batch of 2: ([\d,]+) bytes on the device, ([\d,]+) in host", together)
    device, host = (int(word.replace(",", "")) for word in both)
    assert 0 < device < host
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(text.replace("\n", " ") + "\n" for text in texts.values())))
    lines = run(monkeypatch, capsys, "summarise_batch", "-", *short)
    assert re.findall(r"line \d", lines) == ["line 3", "line 1"]  # the shorter one first


def test_the_prompts_of_summarise_batch():
    found = runpy.run_path("examples/summarise_batch.py")
    tokenizer = AutoTokenizer.from_pretrained("artifacts/tiny-llama")
    text = "The ferry was late. " * 9
    assert found["prompt"](tokenizer, text, 1000) == text + found["OPENING"]
    cut = found["prompt"](tokenizer, text, 7).removesuffix(found["OPENING"])
    assert text.startswith(cut)
    assert len(tokenizer(cut, add_special_tokens=False)["input_ids"]) == 7
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    )
    assert found["prompt"](tokenizer, text, 7) == f"<user>{found['INSTRUCTION']}{cut}True"


GRID = {"method": ["zipcache", "mikv"], "ratio": [0.5], "bits": [4]}


def sweep(folder: Path) -> list[str]:
    """Options for a small sweep into `folder`."""
    content = {"method": "grid", "parameters": {name: {"values": values} for name, values in GRID.items()}}
    (folder / "small.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return ["--sweep", str(folder / "small.yaml"), "--cases", "2", "--output", str(folder / "out")]


@pytest.mark.full
def test_wandb_sweep(monkeypatch, capsys, tmp_path):
    pytest.importorskip("lightning")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    out = run(monkeypatch, capsys, "wandb_sweep", *sweep(tmp_path))
    assert [line.split(",")[0] for line in out.splitlines()] == ["{'method': 'zipcache'", "{'method': 'mikv'"]
    logged = sorted(tmp_path.glob("out/csv/*/metrics.csv"))
    assert len(logged) == 2
    for line, path in zip(out.splitlines(), logged, strict=True):
        names, values = (row.split(",") for row in path.read_text().splitlines())
        found = dict(zip(names, map(float, values), strict=True))
        assert f": {found['exact']:.2f} exact at {found['bits_per_value']:.2f} bits" in line
    cells = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/cells/*.json")}
    assert len(cells) == 2

    class Logged(dict):
        """The part of a W&B run (`wandb.init`) that the example uses."""

        def __init__(self, config):
            self.config = config

        log = dict.update

    runs = []

    @contextmanager
    def init(**options):
        runs.append(Logged(dict(zip(GRID, (GRID["method"][len(runs)], 0.5, 4), strict=True))))
        yield runs[-1]

    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("calib.loggers.logged_in", lambda: True)
    monkeypatch.setattr(wandb, "sweep", lambda content, project: content["parameters"])
    monkeypatch.setattr(wandb, "agent", lambda sweep, function, project: [function(), function()])
    monkeypatch.setattr(wandb, "init", init)
    run(monkeypatch, capsys, "wandb_sweep", *sweep(tmp_path))
    assert [f"{found['exact']:.2f} exact at {found['bits_per_value']:.2f} bits" for found in runs] == [
        line.split("}: ")[1] for line in out.splitlines()
    ]
    assert cells == {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/cells/*.json")}  # not measured again


def test_the_shipped_sweep_is_one():
    pytest.importorskip("lightning")
    content = yaml.safe_load((ROOT / "examples/wandb_sweep.yaml").read_text())
    row = runpy.run_path("examples/wandb_sweep.py")["row"]
    from calib.evaluate.entries import read_entries

    names, values = zip(*((name, one["values"]) for name, one in content["parameters"].items()), strict=True)
    assert names == tuple(GRID)
    assert row("zipcache", 0.25, 8)["tiers"] == [[8, 0.25], [2, 0.75]]
    for method in values[0]:
        for ratio in values[1]:
            for bits in values[2]:
                read_entries([row(method, ratio, bits)])  # raises for unknown options


@pytest.mark.full
def test_lm_eval_compressed(monkeypatch, capsys):
    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(SystemExit):
            run(monkeypatch, capsys, "lm_eval_compressed")
        assert "pip install 'calib-kv[lm-eval]'" in capsys.readouterr().err
        pytest.skip("lm-eval is not installed: its task is not run")
    out = run(monkeypatch, capsys, "lm_eval_compressed", "--limit", "2", "--method", "rtn", "--option", "bits=8")
    assert "keyed_lines  acc,none: 1.0000" in out
    # 8-bit codes, a range for each token, and the empty slots of the pages
    assert float(re.search(r"([\d.]+) bits per value", out)[1]) == pytest.approx(8.5, abs=0.6)


def test_prefix_cache(monkeypatch, capsys):
    asked = ("--question", "line window: ", "--question", "line river: ")
    first = run(monkeypatch, capsys, "prefix_cache", *asked)
    again = run(monkeypatch, capsys, "prefix_cache", *asked)
    assert "compressed" in first and "compressed" not in again  # the second run reads the file
    for out in (first, again):
        assert re.findall(r"'(line \w+: )' -> '(\d+)'", out) == [("line window: ", "1177"), ("line river: ", "4821")]
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "prefix_cache", "--bits", "2")
    assert "error: prefix.safetensors: the prefix was made with options bits = 4" in capsys.readouterr().err


def test_onnx_codec(monkeypatch, capsys):
    pytest.importorskip("onnx", reason="the extra `export` (onnx) is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    lost = []
    for bits in ("2", "8"):
        out = run(monkeypatch, capsys, "onnx_codec", "--bits", bits)
        packed, whole = (
            int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:bytes packed|in 16 bits)", out)
        )
        assert packed == whole * (int(bits) + 0.5) / 16  # 32 bits of parameters a token and head of 64 channels
        lost.append(float(re.search(r"differs by (\S+) of", out)[1]))
    assert lost[1] < 0.01 < lost[0] < 1
