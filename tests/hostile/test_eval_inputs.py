"""Wrong configurations and arguments of `calib eval`: each gives one line and status 2, before anything is measured. Broken models
fail their cells, with status 1."""

import json

import pytest
import yaml
from toy_language_model import save_toy

from calib import cli

GOOD = {
    "methods": [{"name": "all", "method": "full"}, {"name": "few", "method": "rtn", "bits": 2}],
    "tasks": [{"task": "retrieval", "lines": [2], "cases": 2}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


def ask(tmp_path, model, capsys, content, *words):
    """Run `calib eval` with this configuration and further words; return its status and standard error."""
    file = tmp_path / "asked.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump({"model": model, **GOOD, **content}))
    status = cli.main(["eval", "--config", str(file), "--output", str(tmp_path / "out"), *words])
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is empty"),
        ("- 1", "holds a list"),
        ("methods: [", "is not valid YAML"),
        ("model: x", "'methods' must be a list"),
        ({"metods": []}, "unknown key 'metods' (did you mean 'methods'?)"),
        ({"methods": []}, "'methods' must be a list of entries"),
        ({"methods": "full"}, "'methods' must be a list of entries"),
        ({"methods": ["full"]}, "methods[0] must be an entry such as"),
        ({"methods": [{"name": "x"}]}, "methods[0] needs one of `method`"),
        ({"methods": [{"group": "only a heading"}]}, "no methods: give at least one"),
        ({"methods": [{"method": "zipcahe"}]}, "methods: 'zipcahe': unknown method 'zipcahe'"),
        ({"methods": [{"method": "kiwi"}]}, "did you mean 'kivi'?"),
        ({"methods": [{"method": "rtn", "bit": 2}]}, "unknown option 'bit' of method 'rtn' (did you mean 'bits'?)"),
        ({"methods": [{"method": "rtn", "bits": 9}]}, "bits must be a whole number 1 ... 8, got 9"),
        ({"methods": [{"method": "kivi", "group": 24, "residual": 24}]}, "methods: 'kivi': "),
        (
            {"methods": [{"method": "rtn"}, {"method": "rtn"}]},
            "two methods are called 'rtn': give one of them another `name`",
        ),
        (
            {"methods": [{"method": "rtn", "bits": {"3 lines": 2}}]},
            "bits has no value for the column '2 lines' (it has '3 lines')",
        ),
        ({"methods": [{"method": "rtn", "statistics": "calibrated"}]}, "'rtn' wants the artifact: give artifact=FILE"),
        ({"methods": [{"method": "rtn", "artifact": "x"}]}, "artifact must be true or false, got 'x'"),
        ({"artifact": "nope.safetensors"}, "artifact 'nope.safetensors' is no file"),
        ({"tasks": [{"task": "retreival"}]}, "unknown key 'tasks.retreival' (did you mean 'tasks.retrieval'?)"),
        ({"tasks": [{"lines": [2]}]}, "tasks[0] has no `task`"),
        ({"tasks": [{"task": "retrieval", "line": 2}]}, "did you mean 'tasks.retrieval.lines'?"),
        ({"tasks": [{"task": "retrieval", "lines": []}]}, "'tasks.retrieval.lines' (a list of whole numbers)"),
        ({"tasks": [{"task": "retrieval", "lines": [0]}]}, "invalid value 0 for 'tasks.retrieval.lines'"),
        ({"tasks": [{"task": "retrieval", "lines": [9999]}]}, "lines=9999: a document has 1 to"),
        ({"tasks": [{"task": "retrieval", "lines": [200]}]}, "this model was made for 256; ask for fewer lines"),
        ({"tasks": [{"task": "retrieval", "style": "prose"}]}, "'tasks.retrieval.style' (one of line, plain)"),
        ({"tasks": [{"task": "retrieval", "cases": True}]}, "invalid value True for 'tasks.retrieval.cases'"),
        ({"tasks": GOOD["tasks"] * 2}, "two columns are called '2 lines': give one of them another `title`"),
        ({"tasks": [{"task": "perplexity", "title": "a | b"}]}, "'tasks.perplexity.title'"),
        ({"tasks": [{"task": "perplexity", "prefill": 512}]}, "prefill=512 leaves nothing to score"),
        ({"tasks": [{"task": "perplexity", "length": 2048}]}, "takes 2048 tokens and this model was made for 256"),
        ({"tasks": [{"task": "perplexity", "text": "nope.txt"}]}, "no file 'nope.txt'"),
        ({"tasks": [{"task": "perplexity", "text": {"nam": "x"}}]}, "did you mean 'tasks.perplexity.text.name'?"),
        ({"tasks": [{"task": "perplexity", "text": {"split": "test"}}]}, "needs a name"),
        ({"tasks": [{"task": "perplexity", "text": 3}]}, "must be a file, a list of files or null, got 3"),
        ({"tasks": [{"task": "perplexity", "natural_spacing": "no"}]}, "must be true or false, got 'no'"),
        ({"seed": "x"}, "invalid value 'x' for 'seed' (expected a whole number, at least 0)"),
        ({"seed": None}, "invalid value None for 'seed'"),
        ({"batch_size": 0}, "invalid value 0 for 'batch_size'"),
        ({"limit": -1}, "invalid value -1 for 'limit'"),
        ({"threads": 1.5}, "invalid value 1.5 for 'threads'"),
        ({"dtype": "int4"}, "invalid value 'int4' for 'dtype' (expected one of auto, float32"),
        ({"products": "int8"}, "invalid value 'int8' for 'products' (expected one of model, float32)"),
        ({"device": "tpu9"}, "invalid value 'tpu9' for 'device'"),
        ({"device": 0}, "invalid value 0 for 'device'"),
        ({"model": ["x"]}, "invalid value ['x'] for 'model' (expected text)"),
        ({"model": "no/such/model"}, "'no/such/model' is no folder"),
    ],
)
def test_a_wrong_configuration(tmp_path, model, capsys, content, text):
    status, error = ask(tmp_path, model, capsys, content)
    assert status == 2 and text in error, error
    assert error.startswith("calib: error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--limt", "2"], "unknown key 'limt' (did you mean 'limit'?)"),
        (["--limit"], "option '--limit' needs a value"),
        (["--limit", "few"], "invalid value 'few' for 'limit'"),
        (["--limit", "[1"], "the value of '--limit' is not valid YAML: '[1'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--methods", "full"], "unknown key 'methods'"),
        (["--tasks.retrieval.case", "2"], "did you mean 'tasks.retrieval.cases'?"),
        (["--tasks.perplexity.chunk", "2"], "the configuration has no task 'perplexity'"),
        (["--only", "kivi*"], "--only 'kivi*' fits no method's name (there are all, few)"),
        (["--config", "nope.yaml"], "no configuration file 'nope.yaml'"),
    ],
)
def test_wrong_words(tmp_path, model, capsys, words, text):
    status, error = ask(tmp_path, model, capsys, {}, *words)
    assert status == 2 and text in error, error
    assert error.startswith("calib: error: ") and error.count("\n") == 1


def test_no_configuration(capsys):
    assert cli.main(["eval"]) == 2
    assert "'--config' must be given, such as eval/importance.yaml" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(tmp_path, model, capsys):
    (tmp_path / "out").write_text("a file")
    status, error = ask(tmp_path, model, capsys, {})
    assert status == 2 and "is a file, expected a folder" in error


def test_text_that_is_too_short_or_no_text(tmp_path, model, capsys):
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("a few words")
    binary.write_bytes(b"\xff\xfe\x00")
    for file, text in ((short, "does not fill one sequence of 48 tokens"), (binary, "not UTF-8 text")):
        tasks = [{"task": "perplexity", "text": str(file), "prefill": 8, "length": 48, "tokens": 80}]
        status, error = ask(tmp_path, model, capsys, {"tasks": tasks})
        assert status == 2 and text in error, error


def test_weights_that_give_nan_fail_their_cells(tmp_path, capsys):
    from toy_language_model import toy_model

    broken = toy_model()
    broken.model.norm.weight.data[:] = float("nan")
    folder = str(save_toy(tmp_path / "broken", model=broken))
    status, _ = ask(tmp_path, folder, capsys, {})
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert status == 1 and [cell["error"] for cell in cells] == ["RunError: the model's logits are NaN"] * 2
    assert not (tmp_path / "out" / "cells").exists()


def test_a_tokenizer_of_another_model_fails_its_cells(tmp_path, capsys):
    from toy_language_model import toy_model

    small = toy_model()
    small.resize_token_embeddings(40)
    folder = str(save_toy(tmp_path / "small", model=small))
    status, _ = ask(tmp_path, folder, capsys, {})
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert status == 1 and {cell["error"].partition(" token ")[0] for cell in cells} == {
        "RunError: the tokenizer gives"
    }
    assert all(cell["error"].endswith("0 ... 39: give it the tokenizer it was trained with") for cell in cells)
