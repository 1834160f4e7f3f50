"""The arithmetic of the plans of an evaluation and a bench, bytes of a logit, and what docs/plan.md shows of them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from documented import ROOT
from plan_page import example, machines_own, untimed
from toy_language_model import save_toy

from calib import cli
from calib.bench.interleave import PAUSE
from calib.bench.request import BenchRequest
from calib.evaluate.entries import PeerEntry
from calib.evaluate.tasks.agreement import AgreementColumn, Answer, distance
from calib.plan import run_time
from calib.plan.bench_plan import seconds as bench_seconds
from calib.plan.duration import flops
from calib.plan.eval_plan import ColumnWork
from calib.plan.meta_model import read_meta_model
from calib.plan.meta_tensors import META, MetaTensors

PAGE = ROOT / "docs/plan.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


class Pace:
    """A prompt's token takes 1 s, a step 100 s and 10 s more for each token of a row, so that sums are easy."""

    def prefill(self, batch, tokens):
        return batch * tokens

    def step(self, batch, tokens, before):
        assert before >= 10
        return 100 + 10 * batch * tokens


def test_seconds_are_the_forwards_times_how_many_there_are():
    column = SimpleNamespace(rows=10, prompt=40.0, length=72.0, chunk=16, kept_bytes=0)
    work = ColumnWork(column, 4)
    assert (work.batches, work.steps, work.prompt, work.longest, work.chunk) == (3, 2, 40, 72, 16)
    one = 10 / 4 * (4 * 40 + 2 * (100 + 10 * 4 * 16))
    assert work.seconds(Pace(), 3) == 3 * one
    column.kept_bytes = 1  # the full cache's own answers, once
    assert work.seconds(Pace(), 3) == 4 * one
    alone = SimpleNamespace(rows=10, prompt=40.0, length=40.0, passes=2, longest_row=50)
    assert ColumnWork(alone, 5).seconds(Pace(), 1) == 2 * 2 * 5 * 40 and ColumnWork(alone, 5).prompt == 50
    asked = BenchRequest("x", (PeerEntry("a", "", {}, "dynamic"), PeerEntry("b", "", {}, "dynamic")), contexts=(10, 20))
    asked = replace(asked, batches=(1, 2), new_tokens=3, turns=2)
    prompts, steps = 1 * 10 + 2 * 10 + 1 * 20 + 2 * 20, 4 * 100 + 10 * (1 + 2 + 1 + 2)
    warming = 2 * (10 + 3 * 110)
    told = bench_seconds(Pace(), asked, 3, on_gpu=True)
    assert told == {
        "rows alone": 2 * (prompts + 3 * steps) + warming,
        "prompts": 2 * 3 * prompts,
        "new tokens": 3 * (prompts + 4 * steps),
        "largest batches": 0,
    }
    told = bench_seconds(Pace(), replace(asked, memory=1), 3, on_gpu=False)
    assert told["largest batches"] == 2 * sum(
        4 * context + 3 * 140 for context in (10, 20)
    )  # one and two are in the grid
    assert told["prompts"] == 2 * 3 * prompts + 4 * 2 * 3 * PAUSE


def test_a_prompt_grows_with_its_operations_and_a_step_with_its_rows(model, monkeypatch):
    meta_model = read_meta_model(model, "float32")
    pace = run_time.RunPace(meta_model, torch.device("cpu"), tokens=32, prompt=1.0, heads={2: 7.0, 3: 5.0, 6: 11.0})
    layers = meta_model.shape.layers
    assert pace.prefill(2, 128.0) == layers * flops(meta_model, 256, 128) / flops(meta_model, 32, 32) + 7
    row = 2 * meta_model.shape.kv_heads * meta_model.shape.head_dim * 4 * 50
    monkeypatch.setattr(run_time, "KEPT", 2 * row + 1)  # room for two rows of three
    monkeypatch.setattr(run_time, "seconds", lambda work, device: work() or 0.5)
    assert pace.step(3, 2, 50) == layers * 0.5 * 3 / 2 + 11 and pace.steps == {(2, 2, 50): 0.5}
    assert pace.step(3, 1, 50) == layers * 0.5 * 3 / 2 + 5


def test_answers_that_are_compared_take_the_bytes_of_a_logit_that_the_column_tells():
    with MetaTensors() as memory:
        logits = [torch.empty(2, 16, 1000, device=META) for _ in range(2)]
        outputs = torch.empty(2, 1, 16, 1, device=META)
        distance(*(Answer(one, outputs) for one in logits))
    assert memory.most == pytest.approx(AgreementColumn.logit_bytes * logits[0].numel(), rel=0.1)


@pytest.mark.full
def test_the_page_shows_what_the_command_prints(monkeypatch, capsys, tmp_path):
    """Except the time."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "--config", "eval/quick.yaml", "--plan"]) == 0
    shown = example(PAGE.read_text(), "eval example")
    printed = capsys.readouterr().out.rstrip()
    assert machines_own(shown) and untimed(shown) == untimed(printed)


def test_the_table_on_the_page_is_the_run():
    run = json.loads((ROOT / "benchmarks/results/run_plan_cpu.json").read_text())
    wanted = []
    for name in ("eval", "bench"):
        spans = {"caches": "caches of all rows", "memory": "cache, activations and logits of a row alone"}
        wanted += [
            [f"{name}, {words}", "", "", "{:.3f} ... {:.3f}".format(*run[name][key])]
            for key, words in spans.items()
            if key in run[name]
        ]
        for part, one in run[name]["seconds"].items():
            told, ratio = " and ".join(map(str, one["planned"])), "{:.2f} and {:.2f}".format(*one["ratio"])
            wanted.append([f"{name}, seconds, {part}", told, str(one["measured"]), ratio])
        assert all(run_time.LEAST <= ratio <= run_time.MOST for ratio in run[name]["seconds"]["all"]["ratio"])
    table = PAGE.read_text().partition("<!-- run plan table -->\n")[2].partition("\n<!-- end of run plan table")[0]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]] == wanted
