"""Several models in one configuration: a run each, and their tables beside each other."""

import json

import pytest
import yaml
from toy_language_model import save_toy

from calib import cli
from calib.evaluate.request_files import read_request, read_requests

METHODS = [{"name": "all", "method": "full"}, {"name": "rtn-2", "method": "rtn", "bits": 2}]
TASKS = [
    {"task": "retrieval", "lines": [2], "cases": 2},
    {"task": "perplexity", "prefill": 8, "length": 16, "tokens": 8},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        save_toy(root / name)
    return root


def configuration(tmp_path, **content):
    file = tmp_path / "several.yaml"
    file.write_text(yaml.safe_dump({"methods": METHODS, "tasks": TASKS, "dtype": "float32", **content}))
    return str(file)


def test_every_model_has_a_run_and_all_a_table(folders, tmp_path, capsys):
    models = [str(folders / "one"), {"name": "second", "model": str(folders / "two"), "dtype": "bfloat16"}]
    file = configuration(tmp_path, models=models)
    assert cli.main(["eval", "--config", file, "--output", str(tmp_path / "out")]) == 0
    runs = {name: json.loads((tmp_path / "out" / name / "results.json").read_text()) for name in ("one", "second")}
    assert [run["config"]["dtype"] for run in runs.values()] == ["float32", "bfloat16"]
    page = (tmp_path / "out" / "models.md").read_text()
    assert "[report](second/report.md)" in page and "2 lines, by model" in capsys.readouterr().out
    for title, quality in (("2 lines", "exact"), ("perplexity", "perplexity")):
        table = page.split(f"## {title}, by model\n")[1].split("##")[0].strip().splitlines()
        assert table[0] == f"| method | one: {quality} | bits | second: {quality} | bits |"
        for line in table[2:]:
            name, *parts = (part.strip() for part in line.strip("|").split("|"))
            cells = [
                next(c for c in run["cells"] if (c["name"], c["column"]) == (name, title)) for run in runs.values()
            ]
            assert [float(part) for part in parts[::2]] == pytest.approx(
                [c["figures"][quality] for c in cells], rel=0.01
            )
            assert parts[1::2] == [f"{cell['sizes']['bits_per_value']:.2f}" for cell in cells]
    assert len(table) == 2 + len(METHODS)


def test_one_model_is_as_ever(folders, tmp_path):
    file = configuration(tmp_path, model=str(folders / "one"))
    assert list(read_requests([file], [])) == [""] and read_request([file], []).model == str(folders / "one")
    several = read_requests([file], ["--models", "[a/b, {name: c, model: d}]"])
    assert {name: request.model for name, request in several.items()} == {"b": "a/b", "c": "d"}


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ("one", "'models' must be a list"),
        ([], "'models' must be a list"),
        ([3], "models[0] must be a folder, a hub name"),
        ([{"name": "x"}], "models[0] must be a folder, a hub name"),
        ([{"model": "x", "artefact": "f"}], "unknown key 'models.artefact' (did you mean 'models.artifact'?)"),
        (["a/x", "b/x"], "models[1] is called 'x': give it a `name` of its own"),
        ([{"name": "../x", "model": "x"}], "models[0] is called '../x'"),
        ([{"name": "..", "model": "x"}], "models[0] is called '..'"),
        ([".", "x"], "models[0] is called ''"),
    ],
)
def test_refused(tmp_path, capsys, models, text):
    status = cli.main(["eval", "--config", configuration(tmp_path, models=models), "--output", str(tmp_path / "out")])
    assert status == 2 and text in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--compare", "x.json"], ["--write-cases", "x.json"], ["--bench", "x.json"]])
def test_what_is_of_one_model(folders, tmp_path, capsys, words):
    file = configuration(tmp_path, models=[str(folders / "one"), str(folders / "two")])
    assert cli.main(["eval", "--config", file, "--output", str(tmp_path / "out"), *words]) == 2
    assert f"'{words[0]}' is of one model, and the configuration names 2" in capsys.readouterr().err
