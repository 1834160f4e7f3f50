"""`calib eval`: what a run writes and prints; it is reproducible, resumes, and survives a failing cell."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from toy_language_model import save_text, save_toy, toy_model

from calib import cli
from calib.evaluate.entries import MethodEntry, PeerEntry
from calib.evaluate.entries.peer import PEERS
from calib.evaluate.request_files import read_request
from calib.evaluate.tasks import TASKS as TASKS_THERE_ARE
from calib.evaluate.tasks import retrieval
from calib.runtime import Artifact
from calib.runtime.artifact.fingerprint import fingerprint
from calib.runtime.methods import METHODS as METHODS_THERE_ARE

METHODS = [
    {"group": "Reference"},
    {"name": "everything", "method": "full"},
    {"group": "Low bits"},
    {"name": "rtn-2", "method": "rtn", "bits": 2},
    {"name": "kivi", "method": "kivi", "bits": 4, "residual": {"3 lines": 64, "5 lines": 32, "perplexity": 32}},
]
TASKS = [
    {"task": "retrieval", "lines": [3, 5], "cases": 4},
    {"task": "perplexity", "prefill": 20, "chunk": 7, "length": 48, "tokens": 84},
]
CELLS = [(m, c) for m in ("everything", "rtn-2", "kivi") for c in ("3 lines", "5 lines", "perplexity")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


@pytest.fixture
def config(model, tmp_path):
    file = tmp_path / "small.yaml"
    content = {"model": model, "dtype": "float32", "seed": 3, "batch_size": 3, "methods": METHODS, "tasks": TASKS}
    file.write_text(yaml.safe_dump(content))
    return str(file)


def run(config, output, *words):
    """Return the exit status and the content of results.json."""
    status = cli.main(["eval", "--config", config, "--output", str(output), *words])
    return status, json.loads((output / "results.json").read_text())


def without_seconds(document):
    return {**document, "cells": [{**cell, "seconds": 0} for cell in document["cells"]]}


@pytest.mark.full
def test_a_run_writes_every_cell_and_a_page(config, tmp_path, capsys):
    status, document = run(config, tmp_path / "out")
    assert status == 0
    assert [(cell["name"], cell["column"]) for cell in document["cells"]] == CELLS
    assert [cell["group"] for cell in document["cells"]] == ["Reference"] * 3 + ["Low bits"] * 6
    assert [cell["options"]["residual"] for cell in document["cells"][6:]] == [64, 32, 32]
    assert document["config"] == {
        "name": "small",
        "model": Path(document["config"]["model"]).name,
        "limit": None,
        "artifact": None,
        "dtype": "float32",
        "device": "cpu",
        "seed": 3,
        "batch_size": 3,
        "products": "model",
    }
    assert document["model"]["architecture"] == "llama" and document["versions"]["calib"]
    for cell in document["cells"]:
        sizes = cell["sizes"]
        assert sizes["predicted_bytes"] == pytest.approx(sizes["measured_bytes"], rel=0.01)
        assert sizes["share_of_dynamic"] == sizes["measured_bytes"] / sizes["dynamic_bytes"]
        assert sizes["share_of_dynamic"] == pytest.approx(sizes["bits_per_value"] / 32)  # a float32 model
        assert cell["figures"].get("cases", cell["figures"].get("sequences")) == (
            3 if cell["column"] == "perplexity" else 4
        )
    page = (tmp_path / "out" / "report.md").read_text()
    table = page.split("## Methods")[1].split("##")[0]
    lines = [line for line in table.strip().splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == [
        "**Reference**",
        "everything",
        "**Low bits**",
        "rtn-2",
        "kivi",
    ]
    assert "text sampled from the model" in page and "paper counting" in page
    guess = "everything has 0.000 [0.000, 0.490] exact answers, and guessing gives"  # a random model finds no line
    for column, chance in (("3 lines", "0.333"), ("5 lines", "0.200")):
        assert f"† {column} does not distinguish the methods: {guess} {chance}." in page
        assert f"{column}: exact answers, log p †" in table
    assert "† perplexity" not in page and "perplexity †" not in page
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("Reference", "rtn-2", "5 lines", "perplexity", "9 cells, 0 of them finished"))
    assert f"† 3 lines does not distinguish the methods: {guess}" in shown
    assert not list((tmp_path / "out").rglob("*.tmp"))


@pytest.mark.full
def test_the_same_seed_gives_the_same_document_and_another_another(config, tmp_path):
    first, again, other = (
        without_seconds(run(config, tmp_path / name, "--seed", seed)[1])
        for name, seed in (("a", "3"), ("b", "3"), ("c", "4"))
    )
    assert first == again
    assert [cell["figures"] for cell in first["cells"]] != [cell["figures"] for cell in other["cells"]]


@pytest.mark.full
def test_a_killed_run_goes_on_where_it_was(config, tmp_path, monkeypatch, capsys):
    measured, seen = retrieval.LinesColumn.measure, []

    def killed(column, cache, batch):
        seen.append(cache.method)
        if cache.method == "rtn":
            raise KeyboardInterrupt
        return measured(column, cache, batch)

    with monkeypatch.context() as patched:
        patched.setattr(retrieval.LinesColumn, "measure", killed)
        assert cli.main(["eval", "--config", config, "--output", str(tmp_path / "out")]) == 130
    assert seen == ["full"] * 4 + ["rtn"]
    capsys.readouterr()
    _, document = run(config, tmp_path / "out")
    assert "9 cells, 3 of them finished before" in capsys.readouterr().out
    _, fresh = run(config, tmp_path / "other")
    assert without_seconds(document) == without_seconds(fresh)

    _, again = run(config, tmp_path / "out")
    assert again == document  # the seconds as well: nothing was measured
    capsys.readouterr()
    run(config, tmp_path / "out", "--limit", "2")
    assert "9 cells, 0 of them finished before" in capsys.readouterr().out
    run(config, tmp_path / "out")
    assert "9 cells, 9 of them finished before" in capsys.readouterr().out  # the run with --limit has removed no cell
    run(config, tmp_path / "out", "--fresh")
    assert "9 cells, 0 of them finished before" in capsys.readouterr().out


def test_a_failing_cell_is_told_and_the_others_count(config, tmp_path, monkeypatch, capsys):
    measured = retrieval.LinesColumn.measure

    def failing(column, cache, batch):
        if cache.method == "rtn" and column.title == "5 lines":
            raise MemoryError("no room | for\n5 lines")
        return measured(column, cache, batch)

    with monkeypatch.context() as patched:
        patched.setattr(retrieval.LinesColumn, "measure", failing)
        status, document = run(config, tmp_path / "out")
    assert status == 1
    failed = [cell for cell in document["cells"] if "error" in cell]
    assert [(cell["name"], cell["column"], cell["error"]) for cell in failed] == [
        ("rtn-2", "5 lines", "MemoryError: no room | for 5 lines")
    ]
    assert "calib: rtn-2, 5 lines failed: MemoryError" in capsys.readouterr().out
    assert "| failed |" in (tmp_path / "out" / "report.md").read_text()
    status, document = run(config, tmp_path / "out")
    assert status == 0 and not any("error" in cell for cell in document["cells"])
    assert "9 cells, 8 of them finished before" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("sizes", "predicted_bytes", None, "its sizes have no predicted_bytes"),
        ("sizes", "marginal_bits", {}, "its sizes.marginal_bits is no number"),
        ("sizes", "by_kind", {"codes": "text"}, "its sizes.by_kind is no mapping of numbers"),
        ("figures", "exact", 1e299, "its figures.exact is no number"),
        ("figures", "log_probability", 5e-324, "its figures.log_probability is no number"),
        ("figures", "low", None, "its figures are incomplete ('low')"),
        ("reused", "machine", None, "it has no result.reused.results_sha256"),
    ],
)
def test_an_altered_cell_is_measured_again(config, tmp_path, capsys, part, name, value, said):
    asked = config, tmp_path / "out", "--only", "rtn-2"
    _, document = run(*asked)
    for file in (tmp_path / "out" / "cells").glob("*.json"):
        content = json.loads(file.read_text())
        if "exact" in content["result"]["figures"]:
            altered = content["result"].setdefault(part, {})
            altered[name] = value
            if value is None:
                del altered[name]
            file.write_text(json.dumps(content))
    capsys.readouterr()
    status, again = run(*asked)
    shown = capsys.readouterr().out
    assert shown.count(f"cannot be used ({said})") == 2 and "3 cells, 1 of them finished before" in shown
    assert status == 0 and without_seconds(again) == without_seconds(document)


@pytest.mark.full
def test_a_damaged_cell_is_measured_again(config, tmp_path, capsys):
    _, document = run(config, tmp_path / "out", "--only", "everything")
    damaged = sorted((tmp_path / "out" / "cells").glob("*.json"))
    assert len(damaged) == 3
    damaged[0].write_text("{")
    damaged[1].write_text(json.dumps({"key": damaged[1].stem, "result": {"figures": {"exact": "1"}}}))
    damaged[2].write_bytes(damaged[2].read_bytes().replace(damaged[2].stem.encode(), b"0" * 64))
    capsys.readouterr()
    _, again = run(config, tmp_path / "out", "--only", "everything")
    shown = capsys.readouterr().out
    assert shown.count("cannot be used") == 3 and "3 cells, 0 of them finished before" in shown
    assert without_seconds(again) == without_seconds(document)


def test_names_with_brackets_are_names(config, tmp_path, monkeypatch, capsys):
    """Names are not read as mark-up of rich, which draws tables and bars: it would drop `[such]` and fail at `[/such]`."""
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    file, names = tmp_path / "brackets.yaml", ("[Low bits]", "rtn [2 bits]", "text [/such]")
    methods = [{"group": names[0]}, {"name": names[1], "method": "rtn", "bits": 2}]
    content = {"methods": methods, "tasks": [{**TASKS[1], "title": names[2]}]}
    file.write_text(yaml.safe_dump({**yaml.safe_load(Path(config).read_text()), **content}))
    assert run(str(file), tmp_path / "out")[0] == 0
    told = capsys.readouterr()
    assert all(name in told.out for name in names) and names[2] in told.err
    assert cli.main(["eval", "--config", str(file), "--plan"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in names[1:])


def test_an_artifact_of_another_model_is_refused(config, tmp_path, capsys):
    """Also if no row uses the artifact."""
    file = tmp_path / "other.calib.safetensors"
    Artifact({}, fingerprint(toy_model(seed=1)), {}).save(file)
    assert cli.main(["eval", "--config", config, "--output", str(tmp_path / "out"), "--artifact", str(file)]) == 2
    assert (
        "weights" in (error := capsys.readouterr().err) and error.count("\n") == 1 and not (tmp_path / "out").exists()
    )


@pytest.mark.full
def test_only_some_rows(config, tmp_path):
    _, document = run(config, tmp_path / "out", "--only", "rtn*")
    assert {cell["name"] for cell in document["cells"]} == {"rtn-2"}
    _, document = run(config, tmp_path / "out", "--only", "kivi")
    assert {cell["name"] for cell in document["cells"]} == {"rtn-2", "kivi"}  # what was finished before stays


def test_local_text_and_flags_for_tasks(config, tmp_path):
    text = save_text(tmp_path / "words.txt")
    words = ["--tasks.perplexity.text", str(text), "--tasks.retrieval.cases=2", "--only", "everything", "--limit", "3"]
    _, document = run(config, tmp_path / "out", *words)
    lines, _, perplexity = (cell["figures"] for cell in document["cells"])
    assert lines["cases"] == 2 and perplexity["sequences"] == 3
    column = document["columns"][-1]
    assert column["text"] == "words.txt" and re.fullmatch("[0-9a-f]{64}", column["sha256"])
    assert str(tmp_path) not in json.dumps(document)  # figures name no folder


def test_two_rows_that_ask_the_same_are_measured_once(config, tmp_path, capsys):
    content = yaml.safe_load(Path(config).read_text())
    content["methods"] = [{"name": "a", "method": "rtn", "bits": 4}, {"name": "b", "method": "rtn"}]  # 4 is the default
    Path(config).write_text(yaml.safe_dump(content))
    _, document = run(config, tmp_path / "out")
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 3
    a, b = document["cells"][:3], document["cells"][3:]
    assert [cell["figures"] for cell in a] == [cell["figures"] for cell in b]


@pytest.mark.full
def test_corrections_are_one_mapping_or_one_for_each_column(config, tmp_path):
    whole = {"outliers": 0.05}
    content = yaml.safe_load(Path(config).read_text())
    by_column = {"3 lines": whole, "5 lines": {}, "perplexity": {"outliers": 0.25}}
    content["methods"] = [
        {"name": "everywhere", "method": "rtn", "bits": 2, "corrections": whole},
        {"name": "each", "method": "rtn", "bits": 2, "corrections": by_column},
    ]
    Path(config).write_text(yaml.safe_dump(content))
    status, document = run(config, tmp_path / "out")
    assert status == 0
    everywhere, each = document["cells"][:3], document["cells"][3:]
    assert [cell["options"]["corrections"]["outliers"] for cell in document["cells"]] == [0.05] * 4 + [0, 0.25]
    assert each[0]["figures"] == everywhere[0]["figures"] and each[2]["figures"] != everywhere[2]["figures"]
    assert all(cell["sizes"]["paper_counting"] is None for cell in document["cells"])


def test_calibrated_corrections_are_given_the_artifact(config, tmp_path):
    content = yaml.safe_load(Path(config).read_text()) | {"artifact": "fitted.safetensors"}
    asked = {"outliers": 0.05, "statistics": "calibrated"}
    content["methods"] = [{"method": "zipcache", "corrections": asked}, {"method": "kivi", "corrections": {}}]
    later = tmp_path / "later.yaml"
    later.write_text(yaml.safe_dump(content))
    assert [entry.uses_artifact for entry in read_request([str(later)], []).methods] == [True, False]


@pytest.mark.parametrize("path", sorted(Path(str(resources.files("calib") / "configs" / "eval")).glob("*.yaml")))
def test_every_shipped_evaluation_is_a_request(path):
    request = read_request([f"eval/{path.name}"], [])
    assert request.name == path.stem and len(request.methods) >= 2 and request.titles()


def test_the_configurations_are_merged_from_left_to_right(config, tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("seed: 9\nmethods: [{method: full}]\n")
    request = read_request([config, str(later)], ["--batch-size", "5"])
    assert (request.name, request.seed, request.batch_size, request.dtype) == ("later", 9, 5, "float32")
    assert [entry.label for entry in request.methods] == ["full"] and len(request.tasks) == 2


def test_the_embedded_model_s_table_has_every_method_and_task():
    request = read_request(["eval/embedded.yaml"], [])
    # klt has a table of its own, where its budgets stand beside the others; so have methods that evict.
    rows = [row for name in ("klt", "rivals") for row in read_request([f"eval/{name}.yaml"], []).methods]
    rows += request.methods
    assert {entry.name for entry in rows if isinstance(entry, MethodEntry)} == set(METHODS_THERE_ARE)
    assert {entry.peer for entry in request.methods if isinstance(entry, PeerEntry)} == set(PEERS) - {"offloaded"}
    # These tasks have data of their own, which the project does not hold, and the embedded model was not taught to read pass keys.
    elsewhere = ("lm_eval", "longeval", "gsm8k", "humaneval", "passkey")
    assert {type(task) for task in request.tasks} == {
        kind for name, kind in TASKS_THERE_ARE.items() if name not in elsewhere
    }
