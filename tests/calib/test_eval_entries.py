"""Rows that are no method of calib: caches of transformers, and another program's answers to written cases."""

import json
from importlib.util import find_spec

import pytest
import torch
import yaml
from toy_language_model import save_toy, toy_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

from calib import cli
from calib.errors import RunError, UsageError
from calib.evaluate.entries import Given, MethodEntry, PeerEntry, ResultsEntry, read_entries
from calib.evaluate.entries.entry import counting
from calib.evaluate.entries.peer import values_of_token
from calib.evaluate.tasks import Subject, agreement, build_task
from calib.runtime import special_token_ids
from calib.runtime.memory import measure

needs_quanto = pytest.mark.skipif(find_spec("optimum") is None, reason="optimum-quanto is not installed")
TASKS = [
    {"task": "retrieval", "lines": [3], "cases": 5},
    {"task": "perplexity", "prefill": 20, "chunk": 7, "length": 48, "tokens": 84},
]
METHODS = [{"name": "ours", "method": "full"}, {"name": "theirs", "peer": "dynamic"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def given(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Given(model, 7, None, {"weights": {"float32": "the model's"}})


def columns(given):
    subject = Subject(given.model, toy_tokenizer(), 7, 2, None)
    tasks = [build_task(task["task"], {k: v for k, v in task.items() if k != "task"}) for task in TASKS]
    return [column for task in tasks for column in task.columns(subject)]


def evaluated(folder, tmp_path, methods, *words, tasks=TASKS):
    file = tmp_path / "some.yaml"
    content = {"model": folder, "dtype": "float32", "seed": 3, "batch_size": 2, "methods": methods, "tasks": tasks}
    file.write_text(yaml.safe_dump(content))
    status = cli.main(["eval", "--config", str(file), "--output", str(tmp_path / "out"), *words])
    results = tmp_path / "out" / "results.json"
    return status, json.loads(results.read_text()) if results.exists() else None


def test_the_dynamic_cache_says_what_our_full_one_says(folder, tmp_path):
    status, document = evaluated(folder, tmp_path, METHODS)
    assert status == 0
    cells = {(cell["name"], cell["column"]): cell for cell in document["cells"]}
    for title in ("3 lines", "perplexity"):
        ours, theirs = cells["ours", title], cells["theirs", title]
        assert theirs["figures"] == pytest.approx(ours["figures"], rel=1e-4)
        assert theirs["method"] == "peer dynamic" and theirs["sizes"]["predicted_bytes"] is None
    # The model is float32; padding takes memory, but its values are not counted.
    assert cells["theirs", "perplexity"]["sizes"]["bits_per_value"] == 32
    assert cells["theirs", "3 lines"]["sizes"]["bits_per_value"] >= 32


@pytest.mark.full
def test_special_probes_are_those_of_the_models_tokenizer(folder, tmp_path):
    ids = list(special_token_ids(AutoTokenizer.from_pretrained(folder)))
    own = {"method": "zipcache", "recompress": 20, "tiers": [[4, 0.5], [1, 0.5]], "probes": "special"}
    rows = {"asked": own, "by hand": {**own, "special_ids": ids}, "others": {**own, "special_ids": ids[:1]}}
    status, document = evaluated(folder, tmp_path, [{"name": name, **row} for name, row in rows.items()])
    assert status == 0
    found = {cell["name"]: cell["figures"] for cell in document["cells"] if cell["column"] == "perplexity"}
    assert found["asked"] == found["by hand"] != found["others"]


@pytest.mark.slow  # quanto compiles its kernels at their first use
@needs_quanto
@pytest.mark.parametrize("bits", [4, 2])
def test_a_quantised_cache_is_really_used_and_weighed(given, bits):
    _, text = columns(given)
    entry = PeerEntry("q", "", {"bits": bits, "group": 16, "residual": 8}, "quanto")
    figures = {
        one.label: text.summary([part for part, _ in one.answers(given, text, text.batches())])
        for one in (entry, PeerEntry("d", "", {}, "dynamic"))
    }
    assert abs(figures["q"]["perplexity"] - figures["d"]["perplexity"]) > 1e-3
    ((_, size), *_) = entry.answers(given, text, text.batches())
    rows, config = len(text.batches()[0]), given.model.config
    assert size.values == rows * 47 * values_of_token(config)
    # The bytes by hand: codes, scales and shifts of each layer, and its exact tokens.
    cache = QuantizedCache("quanto", config, nbits=bits, axis_key=0, axis_value=0, q_group_size=16, residual_length=8)
    with torch.no_grad(), counting(given.model, cache) as seen:
        given.model(text.batches()[0][:, :20], past_key_values=cache)
    held = 0
    for layer in cache.layers:
        for packed in (layer._quantized_keys, layer._quantized_values):
            held += sum(part.untyped_storage().nbytes() for part in (packed._data._data, packed._scale, packed._shift))
        held += layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
    assert measure(cache) == held and seen.tokens() == 20 * rows


def test_only_real_tokens_of_the_cache_itself_count(given):
    mine, other = DynamicCache(config=given.model.config), DynamicCache(config=given.model.config)
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad(), counting(given.model, mine) as seen:
        given.model(ids, attention_mask=mask, past_key_values=mine)
        given.model(ids, past_key_values=other)
        assert seen.tokens() == 8
        longer = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), 1)
        given.model(ids[:, :1], attention_mask=longer, past_key_values=mine)
    assert seen.tokens() == 10 and not given.model._forward_pre_hooks


@pytest.mark.parametrize("words", [[], ["--only", "theirs"]])
def test_a_run_of_no_cells_is_refused(folder, tmp_path, capsys, words):
    """Such a run must not replace the report of an earlier one by an empty one."""
    methods = METHODS if words else METHODS[1:]
    assert (
        evaluated(folder, tmp_path, methods, *words, tasks=[{"task": "distortion", "length": 40, "sequences": 2}])[0]
        == 2
    )
    err = capsys.readouterr().err
    assert "no cells: none of the tasks can be run with theirs" in err and err.count("\n") == 1
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.full
def test_columns_that_read_pages_are_not_asked_of_others(folder, tmp_path):
    tasks = [*TASKS, {"task": "distortion", "length": 40, "sequences": 2}]
    _, document = evaluated(folder, tmp_path, METHODS, tasks=tasks)
    asked = [(cell["name"], cell["column"]) for cell in document["cells"]]
    assert ("ours", "distance to the bound") in asked and ("theirs", "distance to the bound") not in asked
    table = (tmp_path / "out" / "report.md").read_text().split("## Methods")[1].split("##")[0]
    (line,) = [line for line in table.splitlines() if line.startswith("| theirs")]
    assert line.endswith("|  |  |")  # two empty cells, and none is missing
    assert len(line.split("|")) == len(table.strip().splitlines()[0].split("|"))


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"peer": "quanta"}, "unknown key 'peer quanta' (did you mean 'peer quanto'?)"),
        ({"peer": "quanto", "nbits": 4}, "unknown key 'quanto.nbits'"),
        ({"peer": "quanto", "method": "kivi"}, "needs one of `method`"),
        ({"peer": 4}, "needs one of `method`"),
        pytest.param(
            {"peer": "quanto", "bits": 5},
            "methods: 'quanto': `nbits` for `quanto` backend has to be one of",
            marks=needs_quanto,
        ),
        ({"peer": "offloaded"}, "moves layers off a GPU, got device=cpu"),
        ({"peer": "dynamic", "bits": 2}, "unknown key 'dynamic.bits'"),
        ({"results": "nowhere.json"}, "no file 'nowhere.json'"),
        ({"results": __file__}, "holds no results"),
    ],
)
def test_refused_rows(folder, tmp_path, capsys, entry, text):
    status, _ = evaluated(folder, tmp_path, [entry])
    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert text in line


def answered(cases, given, **changes):
    """Return the results that another library would write, here those of a DynamicCache."""
    written = []
    for column, content in zip(columns(given), cases["columns"], strict=True):
        parts, sizes, values = [], [], []
        entry = PeerEntry("d", "", {}, "dynamic")
        for part, size in entry.answers(given, column, column.batches()):
            if content["kind"] == "text":
                parts.append({"nats": part.tolist()})
            else:
                parts.append({"exact": [[one] for one in part[0].tolist()], "log_probability": part[1].tolist()})
            sizes.append(size.measured_bytes)
            values.append(size.values)
        written.append({"title": content["title"], "settings": content["settings"], "parts": parts})
        written[-1] |= {"bytes": sizes, "values": values}
    base = {"format": 1, "name": "another library", "options": {"ratio": 0.5}, "versions": {"torch": "2"}}
    return {**base, "weights": cases["weights"], "dtype": cases["dtype"], "columns": written, **changes}


@pytest.fixture
def cases(folder, tmp_path):
    status, document = evaluated(folder, tmp_path, METHODS, "--seed", "7", "--write-cases", str(tmp_path / "c.json"))
    assert status == 0 and document is None  # nothing was run
    return json.loads((tmp_path / "c.json").read_text())


@pytest.mark.full
def test_written_cases_are_the_columns_and_answers_to_them_are_a_row(folder, tmp_path, cases, given):
    assert [column["kind"] for column in cases["columns"]] == ["answers", "text"]
    lines = columns(given)[0].batches()
    for batch, written in zip(lines, cases["columns"][0]["batches"], strict=True):
        assert {name: part.tolist() for name, part in batch._asdict().items()} == written
    (tmp_path / "r.json").write_text(json.dumps(answered(cases, given)))
    methods = [*METHODS, {"name": "elsewhere", "results": str(tmp_path / "r.json")}]
    status, document = evaluated(folder, tmp_path, methods, "--seed", "7")
    assert status == 0
    cells = {(cell["name"], cell["column"]): cell for cell in document["cells"]}
    for title in ("3 lines", "perplexity"):
        theirs, elsewhere = cells["theirs", title], cells["elsewhere", title]
        assert elsewhere["figures"] == pytest.approx(theirs["figures"], rel=1e-6)  # other forwards, on another copy
        assert elsewhere["method"] == "another library"
        assert elsewhere["sizes"] == theirs["sizes"] and elsewhere["options"]["ratio"] == 0.5


def test_answers_of_a_column_that_failed_or_is_not_there(folder, tmp_path, cases, given, capsys):
    content = answered(cases, given)
    content["columns"][0] = {**{k: content["columns"][0][k] for k in ("title", "settings")}, "error": "no room"}
    del content["columns"][1]
    (tmp_path / "r.json").write_text(json.dumps(content))
    status, document = evaluated(folder, tmp_path, [{"name": "e", "results": str(tmp_path / "r.json")}], "--seed", "7")
    assert status == 1
    assert [(cell["column"], cell["error"]) for cell in document["cells"]] == [("3 lines", "RunError: no room")]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(weights={"float32": "another"}), "answers another model on the column '3 lines'"),
        (lambda c: c.update(dtype="bfloat16"), "answers another dtype"),
        (lambda c: c["columns"][0]["settings"].update(lines=4), "answers another cases"),
        (lambda c: c.update(format=2), "its format is not 1"),
        (lambda c: c.pop("versions"), "it has no versions"),
        (lambda c: c["columns"][1].pop("bytes"), "columns[1] has no lists of as many parts, bytes, values"),
        (lambda c: c["columns"][1].update(bytes=5), "columns[1] has no lists of as many parts, bytes, values"),
    ],
)
def test_other_answers_are_refused(folder, tmp_path, cases, given, capsys, change, text):
    content = answered(cases, given)
    change(content)
    (tmp_path / "r.json").write_text(json.dumps(content))
    status, _ = evaluated(folder, tmp_path, [{"name": "e", "results": str(tmp_path / "r.json")}], "--seed", "7")
    assert status == 2 and text in capsys.readouterr().err


def test_parts_of_another_shape_fail_their_cell(given):
    lines, text = columns(given)
    with pytest.raises(RunError, match="answers 1 questions of 2"):
        lines.read_part(lines.batches()[0], {"exact": [[True]], "log_probability": []})
    with pytest.raises(RunError, match="0 numbers of 'log_probability'"):
        lines.read_part(lines.batches()[0], {"exact": [[True], [False]]})
    with pytest.raises(RunError, match="1 numbers of 'nats', expected 2"):
        text.read_part(text.batches()[0], {"nats": [1.0]})


def test_cases_of_columns_that_cannot_be_written(folder, tmp_path, capsys):
    tasks = [{"task": "distortion", "length": 40, "sequences": 2}]
    status, _ = evaluated(folder, tmp_path, METHODS, "--write-cases", str(tmp_path / "c.json"), tasks=tasks)
    assert status == 2 and not (tmp_path / "c.json").exists()
    assert "but this run has only 'distance to the bound'" in capsys.readouterr().err


def test_rows_of_a_list():
    entries = read_entries(
        [{"group": "A"}, {"method": "rtn", "bits": 2}, {"group": "B"}, {"name": "q", "peer": "quanto"}]
    )
    assert [(type(entry), entry.label, entry.group) for entry in entries] == [
        (MethodEntry, "rtn", "A"),
        (PeerEntry, "q", "B"),
    ]
    with pytest.raises(UsageError, match="results in a file have no option, got bits"):
        ResultsEntry.of("x", "", {"bits": 2}, "file")


@pytest.mark.full
def test_agreement_of_a_peer_is_the_same_beside_a_live_cache_of_ours(given, monkeypatch):
    """Answers of the full cache that are not kept are computed again during the peer's run, with calib's attention on the model."""
    found = []
    for room in (2**30, 0):
        monkeypatch.setattr(agreement, "KEPT_BYTES", room)
        subject = Subject(given.model, toy_tokenizer(), 7, 2, None)
        options = {"prefill": 20, "chunk": 7, "length": 48, "tokens": 84}
        (column,) = build_task("agreement", options).columns(subject)
        for entry in (MethodEntry("f", "", {}, "full"), PeerEntry("d", "", {}, "dynamic")):
            answers = list(entry.answers(given, column, column.batches()))
        found.append((column.summary([part for part, _ in answers]), sum(size.values for _, size in answers)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5) and found[1][1] == found[0][1] > 0
    assert found[0][0]["agreement"] == 1 and found[0][0]["kl"] < 1e-6
