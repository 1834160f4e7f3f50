"""`calib eval --compare`: figures of this run (now) and an earlier one (then), all other differences, and files that are no run."""

import json

import pytest
import yaml
from one_line import message
from toy_language_model import save_toy
from toy_run import toy_run

from calib import cli
from calib.errors import UsageError
from calib.evaluate.compare import SAME, compared, notes, tables
from calib.evaluate.run_file import read_run


def cell_of(run, name, column):
    (found,) = [cell for cell in run["cells"] if (cell["name"], cell["column"]) == (name, column)]
    return found


def saved(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_every_row_and_column_now_and_then():
    then, now = toy_run(), toy_run()
    cell_of(now, "rtn-2", "needle 64")["figures"] |= {"exact": 0.75, "low": 0.625, "high": 0.875}
    cell_of(now, "rtn-2", "words")["figures"] |= {"perplexity": 24.0, "low": 22.0, "high": 26.0}
    cell_of(now, "rtn-2", "words")["sizes"]["bits_per_value"] = 3.0
    del cell_of(now, "rtn-4", "words")["figures"]["low"]
    needle, words = tables(now, then)
    assert (needle.title, words.title) == (
        "needle 64: this run and the earlier one",
        "words: this run and the earlier one",
    )
    assert needle.header == [
        *("method", "exact", "earlier", "difference", "intervals"),
        *("log probability", "earlier", "difference", "bits", "earlier", "difference"),
    ]
    rows = {row[0]: row[1:] for row in needle.rows}
    assert list(rows) == ["full", "rtn-4", "rtn-2", "worse"]
    assert rows["full"][:4] == ["1.000", "1.000", "", "overlap"]
    assert rows["rtn-2"][:4] == ["0.750", "0.400", "+0.350", "apart"]  # 0.61 and 0.625
    rows = {row[0]: row[1:] for row in words.rows}
    assert rows["rtn-2"] == ["24.00", "30.00", "-6.000", "apart", "3.000", "2.500", "+0.500"]
    assert rows["rtn-4"][:4] == ["9.750", "9.750", "", "-"]
    assert rows["worse"] == ["failed", "failed", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (10.0, 11.0, "overlap"),
        (10.001, 11.0, "apart"),
        (8.0, 8.999, "apart"),
        (8.0, 9.0, "overlap"),
        (9.4, 9.6, "overlap"),
        (1.0, 99.0, "overlap"),
    ],
)
def test_intervals_overlap_where_they_meet(low, high, told):
    then, now = toy_run(), toy_run()
    cell_of(now, "full", "words")["figures"] |= {"low": low, "high": high}  # it was 9 to 10
    assert tables(now, then)[1].rows[0][4] == told


def test_what_only_one_run_has_is_named():
    then, now = toy_run(), toy_run()
    then["columns"] = then["columns"][:1]
    then["cells"] = [cell for cell in then["cells"] if cell["column"] == "needle 64" and cell["name"] != "full"]
    now["cells"] = [cell for cell in now["cells"] if cell["name"] != "worse"]
    assert dict(notes(now, then)) == {
        "earlier run": SAME,
        "columns only in this run": "words",
        "methods only in this run": "full",
        "methods only in the earlier run": "worse",
    }
    (needle,) = tables(now, then)
    rows = {row[0]: row[1:] for row in needle.rows}
    assert rows["full"][:4] == ["1.000", "-", "-", "-"] and rows["worse"][:4] == ["-", "0.500", "-", "-"]
    assert dict(notes(then, now))["columns only in the earlier run"] == "words"


def test_other_models_settings_and_data_are_told():
    then, now = toy_run(), toy_run()
    assert list(notes(now, then)) == [("earlier run", SAME)]
    then["config"] |= {"seed": 4, "name": "another"}
    then["versions"] |= {"torch": "2.11.0"}
    then["model"] |= {"weights": {"float32": "feed"}}
    del then["config"]["products"]  # as runs of earlier releases
    then["columns"][1] |= {"text": "prose.txt", "measures": "in other words"}
    cell_of(then, "rtn-4", "words")["options"] = {"bits": 3}
    assert list(notes(now, then)) == [
        ("earlier run", "another model (weights); seed 4 (now 3); torch 2.11.0 (now 2.13.0)"),
        ("column 'words'", "other data: text prose.txt (now words.txt)"),
        ("rtn-4, words", "other options: bits 3 (now 4)"),
    ]


def test_two_files_are_compared_without_a_run(tmp_path, capsys):
    now = toy_run()
    cell_of(now, "full", "words")["figures"]["perplexity"] = 9.75
    old, new = saved(tmp_path / "old.json", toy_run()), saved(tmp_path / "new.json", now)
    assert cli.main(["eval", "--compare", old, new]) == 0
    shown = capsys.readouterr().out
    assert SAME in shown and "words: this run and the earlier one" in shown and "+0.250" in shown and "worse" in shown


def test_a_run_is_compared_with_an_earlier_one(tmp_path, capsys):
    content = {
        "model": str(save_toy(tmp_path / "model")),
        "methods": [{"name": "all", "method": "full"}, {"name": "few", "method": "rtn", "bits": 2}],
        "tasks": [{"task": "retrieval", "lines": [2], "cases": 2}],
    }
    config = saved(tmp_path / "a.yaml", yaml.safe_dump(content))
    ask = ["eval", "--config", config, "--output"]
    assert cli.main([*ask, str(tmp_path / "first")]) == 0
    old = tmp_path / "first" / "results.json"
    sizes = json.loads(old.read_text())["cells"][1]["sizes"]
    assert sizes["by_kind"]["codes"] > 0 and sum(sizes["by_kind"].values()) == sizes["predicted_bytes"]
    assert (tmp_path / "first" / "report.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert cli.main([*ask, str(tmp_path / "second"), "--seed", "5", "--compare", str(old)]) == 0
    shown = capsys.readouterr().out
    assert "seed 20 (now 5)" in shown and "2 lines: this run and the earlier one" in shown and "report.html" in shown
    for name in ("report.md", "report.html"):
        assert "2 lines: this run and the earlier one" in (tmp_path / "second" / name).read_text()
    assert len(compared(read_run(str(old)), read_run(str(old)), "old.json")) == 2


def cut(*path):
    """The toy run without the entry at `path`."""
    run = inside = toy_run()
    for key in path[:-1]:
        inside = inside[key]
    del inside[path[-1]]
    return run


def put(value, *path):
    """The toy run with `value` at `path`."""
    run = inside = toy_run()
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return run


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no run of `calib eval` ("),
        ('{"format": NaN}', "NaN is not JSON"),
        ("[1]", "it is no mapping"),
        ({"key": "a cell", "result": {}}, "it has no format"),
        (toy_run(format=2), "its format is 2, this release reads 1"),
        (cut("versions"), "it has no versions"),
        (toy_run(cells={}), "it has no cells"),
        (cut("columns", 0, "measures"), "it has no columns[0].measures"),
        (put("text", "cells", 2), "it has no cells[2].name"),
        (put("lines", "cells", 0, "column"), "cells[0].column is 'lines', and there is no such column"),
        (cut("cells", 1, "sizes"), "it has no cells[1].sizes"),
        (put("1", "cells", 0, "figures", "exact"), "cells[0].figures.exact is no number"),
        (put(True, "cells", 0, "sizes", "bits_per_value"), "cells[0].sizes.bits_per_value is no number"),
        (put("4", "cells", 0, "sizes", "paper_counting"), "cells[0].sizes.paper_counting is no number"),
        (
            put({"codes": None}, "cells", 0, "sizes", "by_kind"),
            "cells[0].sizes.by_kind has something else than numbers",
        ),
        (put(["no"], "cells", 7, "error"), "it has no cells[7].error"),
    ],
)
def test_a_file_that_is_no_run_is_one_line(tmp_path, content, reason):
    with pytest.raises(UsageError) as error:
        read_run(saved(tmp_path / "a.json", content))
    text = message(error)
    assert reason in text and text.startswith(str(tmp_path)) and text.endswith("; give the results.json it wrote")


def test_a_file_that_is_not_there_costs_no_run(tmp_path, capsys, monkeypatch):
    with pytest.raises(UsageError) as error:
        read_run(str(tmp_path))
    assert "is a folder, expected a results.json" in message(error)
    monkeypatch.setattr("calib.evaluate.command.prepare", lambda request: pytest.fail("the model is loaded"))
    ask = ["eval", "--config", "eval/quick.yaml", "--output", str(tmp_path / "out"), "--compare", "none.json"]
    assert cli.main(ask) == 2
    assert (
        capsys.readouterr().err == "calib: error: none.json does not exist, expected a results.json of `calib eval`\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--compare"], "argument --compare: expected at least one argument; try `calib eval --help`"),
        (["--compare", "a"], "'--config' must be given, such as eval/importance.yaml or eval/quick.yaml"),
        (["--compare", "a", "b", "c"], "'--compare' got 3 files, expected one file with --config, two without"),
        (
            ["--config", "x", "--compare", "a", "b"],
            "'--compare' got 2 files, expected one file with --config, two without",
        ),
        (
            ["--compare", "a", "b", "--fresh"],
            "'--config' must be given, such as eval/importance.yaml or eval/quick.yaml",
        ),
        (["--compare", "a", "b"], "a does not exist, expected a results.json of `calib eval`"),
    ],
)
def test_wrong_requests_are_one_line(words, line, capsys):
    assert cli.main(["eval", *words]) == 2
    assert capsys.readouterr().err == f"calib: error: {line}\n"
