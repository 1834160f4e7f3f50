"""With --write the benchmarks of plans rewrite both the record and the page, and no benchmark puts half a run into a record."""

import json

import pytest

from benchmarks import plan_cpu, plan_page, protocol, replay_host, run_plan_cpu

PAGE = plan_page.PAGE.read_text()
RUN = json.loads((protocol.RESULTS / run_plan_cpu.RESULT).read_text())


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Returns a copy of docs/plan.md that the benchmarks write, with the records beside it."""
    monkeypatch.setattr(protocol, "RESULTS", tmp_path)
    monkeypatch.setattr(plan_page, "PAGE", tmp_path / "plan.md")
    plan_page.PAGE.write_text(PAGE)
    return plan_page.PAGE


def test_a_kept_run_is_on_the_page(page, monkeypatch, tmp_path):
    run = {name: RUN[name] for name in ("eval", "bench")}
    run["bench"] = {**run["bench"], "memory": [0.125, 0.25]}
    monkeypatch.setattr(run_plan_cpu, "run", lambda: run)
    monkeypatch.setattr(run_plan_cpu, "printed", lambda words, threads: [f"{' '.join(words)} on {threads}"])
    monkeypatch.setattr("sys.argv", ["run_plan_cpu", "--write"])
    run_plan_cpu.main()
    assert json.loads((tmp_path / run_plan_cpu.RESULT).read_text())["bench"] == run["bench"]
    old, new = PAGE.splitlines(), page.read_text().splitlines()
    assert [line for line in new if line not in old] == [
        "eval --config eval/quick.yaml --plan on 1",
        "| bench, cache, activations and logits of a row alone | | | 0.125 ... 0.250 |",
    ]


def test_the_table_of_the_kept_run_is_the_one_on_the_page():
    run = {name: RUN[name] for name in ("eval", "bench")}
    assert "\n".join(["<!-- run plan table -->", *run_plan_cpu.table(run), "<!-- end of"]) in PAGE


@pytest.mark.parametrize(
    ("main", "words", "part"),
    [(plan_cpu.run, ["--models", "wide"], "--models wide"), (replay_host.main, ["--eager", "klt"], "--eager klt")],
    ids=["plan_cpu", "replay_host"],
)
def test_a_part_of_a_run_is_not_written(page, monkeypatch, capsys, tmp_path, main, words, part):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("sys.argv", ["benchmark", "--write", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"--write replaces the whole record; leave out {part}\n" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["plan.md"]
