"""`calib eval --reuse`: cells of an earlier run are taken over where everything that they depend on is the same."""

import hashlib
import json
import shutil

import pytest
import yaml
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from toy_language_model import save_toy, toy_model, toy_tokenizer
from toy_run import toy_run

from calib import cli
from calib.evaluate.cell import Cell
from calib.evaluate.tokenizer_identity import tokenizer_identity
from calib.runtime import Artifact
from calib.runtime.artifact.fingerprint import fingerprint

METHODS = [{"name": "everything", "method": "full"}, {"name": "few", "method": "rtn", "bits": 2}]
TASKS = [
    {"task": "retrieval", "lines": [2], "cases": 2},
    {"task": "perplexity", "prefill": 20, "chunk": 14, "length": 48, "tokens": 56},
]
DIGEST = "results_sha256"
ASKED = {"dtype": "float32", "seed": 3, "batch_size": 2, "methods": METHODS, "tasks": TASKS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def earlier(model, tmp_path_factory):
    """`results.json` of a run, and nothing else of it."""
    folder = tmp_path_factory.mktemp("earlier")
    assert ask(folder, model, {}) == 0
    file = folder / "committed.json"
    (folder / "out" / "results.json").rename(file)
    return file


def ask(folder, model, content, *words):
    """Return the exit status of a run of `ASKED` with changes, into the folder's `out`."""
    file = folder / "asked.yaml"
    file.write_text(yaml.safe_dump({"model": model, **ASKED, **content}))
    return cli.main(["eval", "--config", str(file), "--output", str(folder / "out"), *words])


def results(folder):
    return json.loads((folder / "out" / "results.json").read_text())


def changed(earlier, folder, change):
    """Write a copy of the earlier run to which `change` was applied; return its path."""
    content = json.loads(earlier.read_text())
    change(content)
    file = folder / "changed.json"
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture
def measured(monkeypatch):
    """A list that gets the row and column of each cell that is measured."""
    found, measure = [], Cell.measure

    def watched(self, *args):
        found.append((self.entry.label, self.column.title))
        return measure(self, *args)

    monkeypatch.setattr(Cell, "measure", watched)
    return found


@pytest.mark.full
def test_a_fresh_clone_goes_on_from_a_committed_file(model, earlier, tmp_path, measured, capsys):
    more = [*METHODS, {"name": "some", "method": "rtn", "bits": 4}]
    assert ask(tmp_path, model, {"methods": more}, "--reuse", str(earlier)) == 0
    assert measured == [("some", "2 lines"), ("some", "perplexity")]
    shown = capsys.readouterr().out
    assert f"calib: 4 cells are taken over from {earlier}\n" in shown and "6 cells, 4 of them finished before" in shown
    then, now = json.loads(earlier.read_text()), results(tmp_path)
    source = {DIGEST: hashlib.sha256(earlier.read_bytes()).hexdigest(), "machine": then["machine"]}
    assert now["cells"][:4] == [{**cell, "reused": source} for cell in then["cells"]]
    assert not any("reused" in cell for cell in now["cells"][4:])
    assert {key: now[key] for key in now if key != "cells"} == {key: then[key] for key in then if key != "cells"}
    said = f"4 cells were taken over from an earlier run and not measured again. SHA-256 of its results.json: {source[DIGEST]};"
    assert all(said in (tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))

    measured.clear()  # reused cells stay finished, with the file and without it
    assert ask(tmp_path, model, {"methods": more}, "--reuse", str(earlier)) == 0
    assert ask(tmp_path, model, {"methods": more}) == 0
    assert not measured and results(tmp_path) == now
    assert "calib: 0 cells are taken over" in capsys.readouterr().out


def test_what_was_taken_over_keeps_its_origin(model, earlier, tmp_path, measured):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, file in ((first, earlier), (second, first / "out" / "results.json")):
        folder.mkdir()
        assert ask(folder, model, {}, "--reuse", str(file)) == 0
    assert not measured and results(first)["cells"] == results(second)["cells"]


def test_another_name_of_the_same_row(model, earlier, tmp_path, measured):
    other = [{"name": "all of it", "method": "full"}, METHODS[1]]
    assert ask(tmp_path, model, {"methods": other}, "--reuse", str(earlier)) == 0
    assert not measured and [cell["name"] for cell in results(tmp_path)["cells"][:2]] == ["all of it"] * 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"seed": 4}, "seed 3 (now 4)"),
        ({"batch_size": 3}, "batch size 2 (now 3)"),
        ({"dtype": "bfloat16"}, "another model (weights); dtype float32 (now bfloat16)"),
        ({"products": "float32"}, "products model (now float32)"),
    ],
)
def test_another_run_is_refused(model, earlier, tmp_path, measured, capsys, content, text):
    assert ask(tmp_path, model, content, "--reuse", str(earlier)) == 2
    error = capsys.readouterr().err
    assert error == f"calib: error: --reuse {earlier} differs from this run: {text}; run without --reuse\n"
    assert not measured and not (tmp_path / "out").exists()


def test_another_model_is_refused(earlier, tmp_path, measured, capsys):
    weights = toy_model()
    weights.model.layers[1].self_attn.k_proj.weight.data[0] += 1
    other = str(save_toy(tmp_path / "other", model=weights))
    assert ask(tmp_path, other, {}, "--reuse", str(earlier)) == 2
    assert "another model (weights)" in capsys.readouterr().err and not measured


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda run: run["versions"].update(torch="1.0"), "torch 1.0 (now "),
        (lambda run: run["versions"].pop("calib"), "calib none (now "),
        (lambda run: run["config"].pop("seed"), "seed none (now 3)"),
        (lambda run: run["config"].update(device="cuda"), "device cuda (now cpu)"),
        (lambda run: run["model"].update(config_hash="c0ffee"), "another model (config hash)"),
        (lambda run: run["model"].update(tokenizer="c0ffee"), "another tokenizer"),
        (lambda run: run.update(cells=[]), "has none of this run's cells"),
        (lambda run: [cell["options"].update(bits=3) for cell in run["cells"] if "bits" in cell["options"]]
         and [cell.update(method="kivi") for cell in run["cells"][:2]], "method kivi (now full)"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(model, earlier, tmp_path, measured, capsys, change, text):
    assert ask(tmp_path, model, {}, "--reuse", changed(earlier, tmp_path, change)) == 2
    error = capsys.readouterr().err
    assert text in error and error.startswith("calib: error: --reuse") and error.count("\n") == 1
    assert not measured and not (tmp_path / "out").exists()


FEW = [("few", "2 lines"), ("few", "perplexity")]
EVERY = [("everything", "2 lines"), ("everything", "perplexity"), *FEW]


@pytest.mark.parametrize(
    ("change", "cells", "text"),
    [
        (lambda run: [cell["options"].update(bits=3) for cell in run["cells"][2:]], FEW,
         "few (2 lines), few (perplexity): other options: bits 3 (now 2)"),
        (lambda run: run["cells"][2]["options"].update(bits=2.0), FEW[:1], "few (2 lines): its key differs, for an unknown reason"),
        (lambda run: run["cells"][2]["options"].pop("bits"), FEW[:1], "few (2 lines): other options: bits none (now 2)"),
        (lambda run: run["columns"][0].update(digits=5), [("everything", "2 lines"), FEW[0]],
         "everything (2 lines), few (2 lines): other data: digits 5 (now 4)"),
        (lambda run: run["cells"][2].update(artifact=True) or run["config"].update(artifact="ab" * 32), FEW[:1],
         "few (2 lines): another artifact"),
        (lambda run: [run["cells"][2].pop(part) for part in ("figures", "sizes", "seconds")]
         and run["cells"][2].update(error="MemoryError: no room"), FEW[:1], "few (2 lines): it failed (MemoryError: no room)"),
        (lambda run: run["cells"][2]["figures"].pop("low"), FEW[:1], "few (2 lines): its figures are incomplete ('low')"),
        (lambda run: run["cells"][2]["sizes"].pop("paper_counting"), FEW[:1], "its sizes have no paper_counting"),
        (lambda run: run["cells"][2]["sizes"].update(predicted_bytes="many"), FEW[:1], "its sizes.predicted_bytes is no number"),
        (lambda run: run["cells"][2]["sizes"].update(marginal_bits={}), FEW[:1], "its sizes.marginal_bits is no number"),
        (lambda run: run["cells"][2].pop("seconds"), FEW[:1], "its seconds are no number"),
        (lambda run: run["cells"][2].update(packages={"hqq": "0.1"}), FEW[:1], "hqq 0.1 (now none)"),
    ],
)  # fmt: skip
def test_a_cell_that_is_another_is_measured(model, earlier, tmp_path, measured, capsys, change, cells, text):
    file = changed(earlier, tmp_path, change)
    assert ask(tmp_path, model, {}, "--reuse", file) == 0
    assert measured == cells
    shown = capsys.readouterr().out
    assert f"calib: not taken over from {file}: " in shown and text in shown
    now, then = results(tmp_path), json.loads(earlier.read_text())
    assert [cell["figures"] for cell in now["cells"]] == [cell["figures"] for cell in then["cells"]]


@pytest.mark.full
def test_an_artifact_is_told_by_its_bytes(model, tmp_path, measured, capsys):
    """Cells are reused with the same artifact, but not with another one in a file of the same name."""
    calibrated = {"methods": [METHODS[0], {"name": "given", "method": "full", "artifact": True}]}
    file = tmp_path / "toy.calib.safetensors"
    Artifact({}, fingerprint(toy_model()), {"seed": 1}).save(file)
    asked = {**calibrated, "artifact": str(file)}
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    assert ask(first, model, asked) == 0
    measured.clear()
    assert ask(second, model, asked, "--reuse", str(first / "out" / "results.json")) == 0 and not measured
    Artifact({}, fingerprint(toy_model()), {"seed": 2}).save(file)
    assert ask(third, model, asked, "--reuse", str(first / "out" / "results.json")) == 0
    assert measured == [("given", "2 lines"), ("given", "perplexity")]
    assert "given (2 lines), given (perplexity): another artifact" in capsys.readouterr().out


@pytest.mark.full
def test_a_package_that_answers_is_told_with_its_version(model, tmp_path, measured, monkeypatch, capsys):
    """A cell for which the package's version is not recorded is measured again."""
    said = {"optimum-quanto": "0.2.6"}
    monkeypatch.setattr("calib.evaluate.entries.method.MethodEntry.packages", said, raising=False)
    folders = [tmp_path / name for name in ("first", "same", "other", "untold")]
    for folder in folders:
        folder.mkdir()
    assert ask(folders[0], model, {}) == 0
    file = folders[0] / "out" / "results.json"
    assert all(cell["packages"] == said for cell in results(folders[0])["cells"])
    measured.clear()
    assert ask(folders[1], model, {}, "--reuse", str(file)) == 0 and not measured
    untold = changed(file, tmp_path, lambda run: run["cells"][2].pop("packages"))
    assert ask(folders[3], model, {}, "--reuse", untold) == 0 and measured == FEW[:1]
    assert "few (2 lines): the version of optimum-quanto is not recorded" in capsys.readouterr().out
    said["optimum-quanto"] = "0.2.7"
    assert ask(folders[2], model, {}, "--reuse", str(file)) == 2
    assert "optimum-quanto 0.2.6 (now 0.2.7)" in capsys.readouterr().err
    # The run's own finished cells are not used either.
    assert ask(folders[0], model, {}) == 0 and measured == FEW[:1] + EVERY


def test_a_file_of_an_earlier_release_says_nothing_of_its_tokenizer(model, earlier, tmp_path, measured, capsys):
    file = changed(earlier, tmp_path, lambda run: run["model"].pop("tokenizer") and run["config"].pop("products"))
    assert ask(tmp_path, model, {}, "--reuse", file) == 0 and not measured
    assert f"calib: {file} does not record its tokenizer" in capsys.readouterr().out


@pytest.mark.full
def test_finished_cells_are_those_of_their_tokenizer(model, tmp_path, measured):
    """Another tokenizer in the same folder, with the same weights, makes other tokens of a text: all cells are measured again."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert ask(tmp_path, str(folder), {}) == 0
    before = results(tmp_path)
    measured.clear()
    other = toy_tokenizer()
    other.backend_tokenizer.normalizer = Lowercase()
    other.save_pretrained(folder)
    assert ask(tmp_path, str(folder), {}) == 0 and measured == EVERY
    assert results(tmp_path)["model"]["tokenizer"] != before["model"]["tokenizer"]


@pytest.mark.full
def test_tokenizers_that_differ_in_special_tokens_alone_are_two(model, tmp_path, measured, capsys):
    """The same words, split in the same way: but an answer ends at another one."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert ask(tmp_path, str(folder), {}) == 0
    before = results(tmp_path)
    file = tmp_path / "before.json"
    file.write_text(json.dumps(before))
    untold = changed(file, tmp_path, lambda run: run["model"].pop("special_tokens"))
    other = toy_tokenizer()
    ends = (other.eos_token_id, 5)
    other.eos_token = other.convert_ids_to_tokens(5)
    other.save_pretrained(folder)
    measured.clear()
    (tmp_path / "again").mkdir()
    assert ask(tmp_path / "again", str(folder), {}, "--reuse", str(file)) == 2 and not measured
    assert f"special tokens: eos token {ends[0]} (now {ends[1]})" in capsys.readouterr().err
    assert ask(tmp_path, str(folder), {}) == 0 and measured == EVERY
    now = results(tmp_path)["model"]
    assert now["tokenizer"] == before["model"]["tokenizer"]
    assert now["special_tokens"] != before["model"]["special_tokens"]
    assert ask(tmp_path / "again", str(folder), {}, "--reuse", untold) == 0
    assert f"calib: {untold} does not record its special tokens" in capsys.readouterr().out


def test_a_tokenizer_is_told_by_its_words_and_by_how_it_parts_them():
    same, other, longer = toy_tokenizer(), toy_tokenizer(), toy_tokenizer()
    other.add_tokens(["rain"])
    assert tokenizer_identity(same) == tokenizer_identity(toy_tokenizer()) != tokenizer_identity(other)
    before = tokenizer_identity(longer)
    longer.backend_tokenizer.pre_tokenizer = Whitespace()
    assert tokenizer_identity(longer) != before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--reuse", "nowhere.json"], "nowhere.json does not exist, expected a results.json of `calib eval`"),
        (["--reuse", "bench.json"], "bench.json is no run of `calib eval`"),
        (["--reuse", "toy.json"], "another model (config hash, weights)"),
        (
            ["--reuse", "toy.json", "--fresh"],
            "'--reuse' copies finished cells, which '--fresh' does not use; give one of them",
        ),
        (
            ["--reuse", "toy.json", "--write-cases", "x.json"],
            "'--reuse' copies finished cells, which '--write-cases' does not use",
        ),
        (["--reuse", "toy.json", "--models", "[a, b]"], "'--reuse' is of one model, and the configuration names 2"),
        (["--reuse"], "expected one argument"),
    ],
)
def test_wrong_words(model, tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.json").write_text(json.dumps(toy_run()))
    (tmp_path / "bench.json").write_text("{}")
    assert ask(tmp_path, model, {}, *words) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_a_terminal_obeys_is_not_printed(model, earlier, tmp_path, capsys):
    file = changed(earlier, tmp_path, lambda run: run["cells"][2]["options"].update(statistics="\x1b[31m\n"))
    assert ask(tmp_path, model, {}, "--reuse", file) == 0
    shown = capsys.readouterr().out
    assert "statistics ?[31m? (now " in shown and "\x1b" not in shown
