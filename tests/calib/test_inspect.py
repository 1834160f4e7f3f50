"""`calib inspect`: the tables, the JSON, and one line for everything that is wrong."""

import json
import math
import re
import sys

import pytest
import torch
from time_limit import time_limit
from toy_artifact import TOY_FIGURES, toy_artifact, toy_components, toy_model, toy_tensors

from calib.cli import main


@pytest.fixture
def path(tmp_path):
    toy_artifact().save(tmp_path / "toy.calib.safetensors")
    return tmp_path / "toy.calib.safetensors"


@pytest.fixture(params=["rich", "plain"])
def with_and_without_rich(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    if request.param == "plain":
        for name in ("rich", "rich.console", "rich.table", "rich.text"):
            monkeypatch.setitem(sys.modules, name, None)  # what an import finds where rich is not installed


@pytest.mark.usefixtures("with_and_without_rich")
def test_the_tables_show_everything_within_80_columns(path, capsys):
    assert main(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    for words in ("llama, 2 layers", "4096", "generated", "2.13.0", "rope_theta", "clip factors at 1, 2, 3, 4 bits"):
        assert words in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for name, tensor in toy_tensors().items():
        assert str(list(tensor.shape)) in lines[name]
        assert f"{tensor.max().item():.4g}" in lines[name]
    assert lines["seed"].split()[1] == "7"
    assert lines["1"].split() == ["1", "0.1235", "4.5"]  # the last layer's metrics


@pytest.mark.usefixtures("with_and_without_rich")
def test_many_metrics_are_spread_over_tables_of_80_columns(tmp_path, capsys):
    layers = [{"layer": layer, **{f"error of method {i}": layer + i / 7 for i in range(9)}} for layer in range(3)]
    layers[1].pop("error of method 4")
    toy_artifact(provenance={"metrics": {"layers": layers}}).save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for i in range(9):
        assert out.count(f"error of method {i}") == 1
    shown = {cell for line in out.splitlines() for cell in line.split()}
    assert {f"{layer + i / 7:.4g}" for layer in range(3) for i in range(9) if (layer, i) != (1, 4)} <= shown
    assert "-" in shown  # the one that is missing


@pytest.mark.usefixtures("with_and_without_rich")
@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"layers": "many"}, "layers many"),
        ({"layers": []}, "layers []"),
        ({"layers": [1, 2]}, "layers [1, 2]"),
        ([1, 2], "[1, 2]"),
        ("text", "text"),
        (None, None),
        ({"overall": {"loss": 1.0714520081401504, "parts": [2e-7 / 3, 3]}}, "overall loss 1.071, parts [6.667e-08, 3]"),
    ],
    ids=["metrics0", "metrics1", "metrics2", "metrics3", "text", "None", "rounded"],
)
def test_metrics_of_another_shape_are_shown_as_they_are(tmp_path, capsys, metrics, shown):
    toy_artifact(provenance={"metrics": metrics}, tensors={}).save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("metrics ")]
    assert [text.strip() for _, text in lines] == [shown] * (shown is not None) and "0 tensors" in out


@pytest.mark.usefixtures("with_and_without_rich")
def test_control_characters_of_the_file_do_not_reach_the_terminal(tmp_path, capsys):
    provenance = {"data": {"dataset": "\x1b[2Jgone\nnext [red]x[/red]"}}
    provenance["\x1b[31m"] = {"metrics": {"layers": [{"\x1b[32m": 1.0}]}}
    toy_artifact(provenance=provenance).save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "?[2Jgone?next [red]x[/red]" in out


@pytest.mark.full
def test_what_is_too_long_for_a_table_is_cut(tmp_path, capsys):
    """A text of megabytes, and two thousand layers with metrics of their own each, which would be two hundred million cells."""
    layers = [{f"{row}/{number}": 1.0 for number in range(50)} for row in range(2000)]
    notes = {f"note {number}": number for number in range(50_000)}
    toy_artifact(provenance={"note": "x" * 10**6, "metrics": {"layers": layers}, **notes}).save(tmp_path / "a")
    with time_limit(30):
        assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert 10_000 < len(out) < 30_000 and "49937 entries more: shown by --json" in out


def test_heads_too_small_for_a_word_have_no_table_of_bits(tmp_path, capsys):
    """Two components of 8 bits are a word: a head of one channel has none, and of four no budget of one bit."""
    for channels, shown in ((1, False), (4, True)):
        model = toy_model(head_dim=channels, num_key_value_heads=1)
        tensors = toy_components((2, 1, channels), torch.Generator().manual_seed(0))
        toy_artifact(model, tensors=tensors).save(tmp_path / "a")
        assert main(["inspect", str(tmp_path / "a")]) == 0
        assert ("bits of klt by layer" in capsys.readouterr().out) == shown


def test_an_artifact_with_components_before_rope_alone_has_a_table_of_bits(tmp_path, capsys):
    """`calib export --format artifact` writes such an artifact for `klt`, and the repository has one."""
    after = re.compile(r"keys\.klt\.(mean|basis|steps|errors)|klt\.loss")
    tensors = {name: tensor for name, tensor in toy_tensors().items() if not after.fullmatch(name)}
    tables = []
    for name, held in (("all", toy_tensors()), ("part", tensors)):
        toy_artifact(tensors=held).save(tmp_path / name)
        assert main(["inspect", str(tmp_path / name)]) == 0
        tables.append(capsys.readouterr().out.partition("bits of klt by layer")[2].partition("tensors, clip")[0])
        assert main(["inspect", str(tmp_path / name), "--html", str(tmp_path / "page.html")]) == 0
        assert "Where klt spends its bits" in (tmp_path / "page.html").read_text()
        capsys.readouterr()
    rows = [[line.split() for line in table.splitlines()[:-1]] for table in tables]
    assert rows[0] == rows[1] and len(rows[0]) > 3


@pytest.mark.usefixtures("with_and_without_rich")
def test_groups_of_layers_have_a_line_each(tmp_path, capsys):
    toy_artifact(provenance={"metrics": {"dictionaries": TOY_FIGURES}}).save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["keys.0"] == ["0", "16", "8", "0.2", "0.1", "3", "5"]
    assert lines["keys.1"] == ["1", "16", "8", "0.4", "0.3", "2", "0"]
    assert lines["values.0"] == ["0-1", "16", "4", "0.25", "0", "3", "1"]
    assert "initial_loss" not in out  # shown in the table, not once more in the summary


@pytest.mark.usefixtures("with_and_without_rich")
@pytest.mark.parametrize(
    "figures",
    [None, [], "many", [5], [{"stream": "keys", "group": 0}], [TOY_FIGURES[0] | {"loss": -1}, TOY_FIGURES[1]]],
)
def test_groups_without_figures_are_shown_all_the_same(tmp_path, capsys, figures):
    toy_artifact(provenance={"metrics": {"dictionaries": figures}}).save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["keys.0"] == ["0", "16", "8", "-", "-", "-", "-"]


def test_json_is_all_that_is_on_stdout(path, capsys):
    assert main(["inspect", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    artifact = toy_artifact()
    assert shown["format_version"] == "1"
    assert shown["fingerprint"] == artifact.fingerprint
    assert shown["provenance"] == artifact.provenance
    assert shown["clip_bits"] == [1, 2, 3, 4]
    assert shown["file"]["bytes"] == path.stat().st_size
    assert shown["tensors"].keys() == toy_tensors().keys()
    for name, tensor in toy_tensors().items():
        entry = shown["tensors"][name]
        assert entry["shape"] == list(tensor.shape)
        assert entry["dtype"] == str(tensor.dtype).removeprefix("torch.")
        for word, value in (("min", tensor.min()), ("median", tensor.median()), ("max", tensor.max())):
            assert math.isclose(entry[word], value.item(), rel_tol=1e-12), (name, word)


def test_json_of_a_tensor_without_entries(tmp_path, capsys):
    toy_artifact(tensors={"later": torch.zeros(0, 3)}).save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["later"]["median"] is None
    assert main(["inspect", str(tmp_path / "a")]) == 0


def test_a_folder_with_one_artifact_is_that_artifact(path, capsys):
    assert main(["inspect", str(path), "--json"]) == 0
    of_file = capsys.readouterr().out
    assert main(["inspect", str(path.parent), "--json"]) == 0
    assert capsys.readouterr().out == of_file
    toy_artifact().save(path.parent / "other.calib.safetensors")
    assert main(["inspect", str(path.parent)]) == 2
    err = capsys.readouterr().err
    assert (
        "holds 2 artifacts (other.calib.safetensors, toy.calib.safetensors)" in err and "name one of these files" in err
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: ARTIFACT"),
        (["{path}", "more"], "unrecognized arguments: more"),
        (["{path}", "--jsno"], "unrecognized arguments: --jsno"),
        (["{path}.missing"], "is no file, expected an artifact"),
        (["{folder}/.."], "holds no calib.safetensors and no NAME.calib.safetensors, expected one"),
        (["{path}", "--html", "{path}"], "must name a file that ends in .html"),
        (["{path}", "--html", "{folder}"], "must name a file that ends in .html"),
        (["{path}", "--html", ""], "must name a file that ends in .html"),
        (["{path}", "--html"], "argument --html: expected one argument"),
        (["{path}", "--json", "--html", "a.html"], "argument --html: not allowed with argument --json"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(path, capsys, arguments, message):
    words = [word.format(path=path, folder=path.parent) for word in arguments]
    assert main(["inspect", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("calib: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_damaged_file_is_one_line_and_status_2(path, capsys, options):
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["inspect", str(path), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"calib: error: {path}: found ")
    assert err.count("\n") == 1
    assert "truncated" in err


def test_inspecting_changes_nothing(path):
    before = path.read_bytes()
    assert main(["inspect", str(path)]) == 0
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
