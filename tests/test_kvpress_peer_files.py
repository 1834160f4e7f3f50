"""The command line of benchmarks/peers: the files that it writes, and its errors of one line."""

import ast
import json
from pathlib import Path

import pytest
from toy_language_model import save_toy, toy_model
from toy_presses import LIBRARY, columns, written

from benchmarks.peers import kvpress
from benchmarks.peers.case_file import read_cases
from benchmarks.peers.mistake import Wrong
from calib.evaluate.entries import ResultsEntry


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def cases(tmp_path_factory, model):
    """A file of cases as `calib eval --write-cases` writes it, beside the folder of its model."""
    folder = tmp_path_factory.mktemp("cases")
    save_toy(folder / "llama")
    content = {"format": 1, "model": str(folder / "llama"), "weights": {"float32": "ab"}, "dtype": "float32"}
    (folder / "cases.json").write_text(json.dumps({**content, "columns": [written(one) for one in columns(model)]}))
    return folder / "cases.json"


def run(monkeypatch, *words):
    monkeypatch.setattr(kvpress, "kvpress", lambda: LIBRARY)
    monkeypatch.setattr(kvpress, "version", lambda name: f"{name} 1")
    return kvpress.main([str(word) for word in words])


@pytest.mark.full
def test_the_results_are_what_the_project_reads(cases, tmp_path, model, monkeypatch, capsys):
    out = tmp_path / "made" / "none.json"
    assert kvpress.main([str(cases), "--press", "none", "--out", str(out)]) == 0
    content = ResultsEntry.of("row", "", {}, str(out)).content
    assert (content["weights"], content["dtype"], content["name"]) == ({"float32": "ab"}, "float32", "kvpress none")
    assert content["options"] == {} and set(content["versions"]) == {"torch", "transformers"}
    for column, entry in zip(columns(model), content["columns"], strict=True):
        assert entry["title"] == column.title and entry["settings"] == column.settings
        column.summary([column.read_part(*pair) for pair in zip(column.batches(), entry["parts"], strict=True)])
    assert "exact 0.000, log p -" in capsys.readouterr().out


@pytest.mark.full
def test_several_presses_write_a_file_each(cases, tmp_path, monkeypatch):
    words = ["--ratio", "0.5", "--option", "label=x", "--attention", "eager", "--out", tmp_path / "out"]
    assert run(monkeypatch, cases, "--press", "KnormPress", "--press", "AdaKVPress:KnormPress", *words) == 0
    files = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert set(files) == {"KnormPress.json", "AdaKVPress-KnormPress.json"}
    own = {"compression_ratio": 0.5, "slope": 0, "label": "x", "attention": "eager"}
    assert files["KnormPress.json"]["options"] == own and files["AdaKVPress-KnormPress.json"]["options"] == {
        **own,
        "share": 0.25,
    }
    assert files["KnormPress.json"]["versions"]["kvpress"] == "kvpress 1"
    assert files["KnormPress.json"]["name"] == "kvpress KnormPress"


def test_a_failed_column_is_the_status(cases, tmp_path, monkeypatch):
    assert run(monkeypatch, cases, "--press", "BrokenPress", "--ratio", "0.5", "--out", tmp_path / "out.json") == 1
    assert all("error" in column for column in json.loads((tmp_path / "out.json").read_text())["columns"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--press", "Knorm", "--ratio", "0.5"], "kvpress has no press 'Knorm'"),
        (["--press", "patched"], "kvpress has no press 'patched'"),
        (["--press", "DecodingPress"], "while it decodes"),
        (["--press", "DMSPress", "--option", "decoding=true"], "while it decodes"),
        (["--press", "KnormPress"], "give --ratio"),
        (["--press", "KnormPress", "--ratio", "1.5"], "BasePress: Compression ratio must be between 0 and 1"),
        (["--press", "DMSPress", "--ratio", "0.5"], "has no option 'compression_ratio' (it has decoding)"),
        (["--press", "KnormPress", "--ratio", "0.5", "--option", "slop=1"], "has no option 'slop'"),
        (["--press", "KnormPress", "--ratio", "0.5", "--option", "slope=1.5"], "invalid value 1.5 for slope (int"),
        (["--press", "KnormPress", "--ratio", "0.5", "--option", "slope"], "expected NAME=VALUE"),
        (["--press", "AdaKVPress"], "wraps another press"),
        (["--press", "KnormPress:AdaKVPress", "--ratio", "0.5"], "wraps another press"),
        (["--press", "KnormPress:OtherPress", "--ratio", "0.5"], "wraps no other press"),
        (["--press", "none", "--device", "toaster"], "on toaster"),
        (["--press", "none", "--press", "DMSPress", "--out", "x.json"], "2 presses need a folder"),
        (["--press", "none", "--out", "."], "is a folder, expected a file"),
    ],
)
def test_wrong_words_are_refused_in_one_line(cases, tmp_path, monkeypatch, capsys, words, said):
    assert run(monkeypatch, cases, "--out", tmp_path / "out.json", *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("kvpress.py: error: ") and error.count("\n") == 1 and len(error) < 400


def test_without_kvpress_its_presses_are_refused(cases, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(kvpress.sys.modules, "kvpress", None)
    assert kvpress.main([str(cases), "--press", "KnormPress", "--out", str(tmp_path / "out.json")]) == 2
    assert "benchmarks/peers/README.md" in capsys.readouterr().err


def change(content, path, value):
    *steps, last = path
    for step in steps:
        content = content[step]
    if value is None:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["format"], 2, "format is not 1"),
        (["model"], None, "no model"),
        (["weights"], "ab", "no weights"),
        (["dtype"], "auto", "dtype is 'auto'"),
        (["columns"], [], "no columns"),
        (["columns", 0, "title"], None, "columns[0]: no 'title'"),
        (["columns", 0], 3, "columns[0]"),
        (["columns", 0, "kind"], "lm_eval", "expected answers or text"),
        (["columns", 0, "batches"], [], "no batches"),
        (["columns", 0, "batches", 0, "asked"], None, "no 'asked'"),
        (["columns", 0, "batches", 0, "asked", 0, 0], -1, "asked is no table of whole numbers"),
        (["columns", 0, "batches", 0, "asked", 0], [1], "asked is no table"),
        (["columns", 0, "batches", 0, "asked"], [[1]], "have not one shape"),
        (["columns", 0, "batches", 0, "mask", 0, -1], 0, "a mask is not zeros and then ones"),
        (["columns", 0, "batches", 0, "mask", 0, 3], 0, "a mask is not zeros and then ones"),
        (["columns", 1, "batches", 0, "tokens"], [[]], "tokens is no table"),
        (["columns", 1, "prefill"], 64, "leave nothing of 64"),
        (["columns", 1, "chunk"], 0, "chunk 0"),
        (["columns", 1, "chunk"], "7", "no whole numbers"),
        (["columns", 1, "batches", 0, "tokens", 0, 0], 259, "token 259"),
        (["model"], "no/such/model", "cannot load the cases' model 'no/such/model'"),
    ],
)
def test_wrong_cases_are_refused_in_one_line(cases, tmp_path, capsys, path, value, said):
    content = json.loads(cases.read_text())
    change(content, path, value)
    (tmp_path / "cases.json").write_text(json.dumps(content))
    assert kvpress.main([str(tmp_path / "cases.json"), "--press", "none", "--out", str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and len(error) < 500
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_file_without_cases_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "cases.json").write_text(text)
    with pytest.raises(Wrong, match=r"cases.*--write-cases"):
        read_cases(tmp_path / "cases.json")


def test_nothing_of_the_project_is_imported():
    files = list(Path(kvpress.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] in ("calib", "runtime", "kernels") for name in names), file
