"""The curves of a bench on the page of an evaluation."""

import json

import pytest
import yaml
from toy_bench_run import made_up
from toy_language_model import save_toy

from calib import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


def evaluated(folder, tmp_path, bench):
    """Return the exit status of `calib eval --bench` with the content `bench` in the file."""
    (tmp_path / "bench.json").write_text(bench if isinstance(bench, str) else json.dumps(bench))
    tasks = [{"task": "retrieval", "lines": [2], "cases": 2}]
    (tmp_path / "e.yaml").write_text(yaml.safe_dump({"model": folder, "methods": [{"method": "full"}], "tasks": tasks}))
    words = ["--config", str(tmp_path / "e.yaml"), "--output", str(tmp_path / "out")]
    return cli.main(["eval", *words, "--bench", str(tmp_path / "bench.json")])


def test_the_curves_stand_on_the_page_and_it_is_still_one_file(folder, tmp_path):
    assert evaluated(folder, tmp_path, made_up()) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.index("<h2>2 lines</h2>") < page.index("<h2>Speed against context</h2>") < page.index("Provenance")
    assert page.count('class="curves"') == 4  # speed and memory of two batches
    assert ".curves path.line" in page and "a processor" in page
    assert "<b>zip" not in page and "&lt;b&gt;zip" in page  # names are text
    assert "://" not in page  # nothing is fetched


def without(*path):
    """A made-up run that lacks an entry."""
    run = made_up()
    inner = run
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return run


@pytest.mark.parametrize(
    ("bench", "text"),
    [
        ("{", "is no run of `calib bench`"),
        ("[]", "its format is not 1"),
        (made_up() | {"format": 2}, "its format is not 1"),
        (without("machine"), "it has no machine"),
        (without("config", "contexts"), "it has no config.contexts"),
        (without("config", "turns"), "it has no config.turns"),
        (without("model", "bytes"), "model.bytes is no number"),
        (without("cells", 0, "sizes"), "it has no cells[0].sizes"),
        (without("cells", 0, "tokens_per_second"), "cells[0].tokens_per_second are not three numbers"),
    ],
)
def test_a_file_that_is_none_costs_no_run(folder, tmp_path, capsys, bench, text):
    assert evaluated(folder, tmp_path, bench) == 2
    assert text in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_file_that_is_not_there(folder, tmp_path, capsys):
    assert cli.main(["eval", "--config", "eval/quick.yaml", "--output", str(tmp_path), "--bench", "nope.json"]) == 2
    assert "nope.json does not exist, expected a results.json of `calib bench`" in capsys.readouterr().err
