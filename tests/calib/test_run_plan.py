"""`calib eval --plan` and `calib bench --plan` against the runs that they plan, on toy models; nothing is loaded or written."""

import json

import pytest
import torch
import yaml
from plan_page import LLAMA2
from tolerances import MEMORY
from toy_language_model import save_text, save_toy, toy_model
from transformers import AutoModelForCausalLM

from calib import cli
from calib.plan import run_time
from calib.plan.cache_sizes import cache_size
from calib.plan.meta_model import read_meta_model
from calib.runtime import compress
from calib.runtime.methods import METHODS

EVALUATION = {
    "dtype": "float32",
    "batch_size": 3,
    "methods": [
        *({"method": name} for name in ("full", "rtn", "zipcache", "h2o")),
        {"name": "kivi-2", "method": "kivi", "bits": 2, "residual": {"6 lines": 32, "text": 64, "same": 32}},
        {"name": "as it comes", "peer": "dynamic"},
    ],
    "tasks": [
        {"task": "retrieval", "lines": [6], "cases": 4},
        {"task": "perplexity", "title": "text", "prefill": 40, "chunk": 16, "length": 160, "tokens": 600},
        {"task": "agreement", "title": "same", "prefill": 40, "chunk": 16, "length": 80, "tokens": 120},
    ],
}
BENCH = {
    "dtype": "float32",
    "methods": ["full", "zipcache", "specache", "h2o"],
    "contexts": [40, 120],
    "batches": [1, 3],
}
BENCH |= {"new_tokens": 8, "turns": 2, "memory": "64MiB"}
FITTED = ("klt", "kvquant", "oscar")  # methods that need an artifact


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


def ask(command, folder, model, content, *words):
    """Return the exit status of a command with the configuration `content`."""
    file = folder / "asked.yaml"
    file.write_text(yaml.safe_dump({"model": model, **content}))
    return cli.main([command, "--config", str(file), *words])


def planned(command, folder, model, content, *words):
    """The plan as JSON."""
    assert ask(command, folder, model, content, "--plan", "--plan_json", str(folder / "plan.json"), *words) == 0
    return json.loads((folder / "plan.json").read_text())


def run(command, folder, model, content):
    assert ask(command, folder, model, content, "--output", str(folder / "out")) == 0
    return json.loads((folder / "out" / "results.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("prompt", "after"), [(90, 60), (60, 1)])
def test_tokens_behind_a_prompt_weigh_what_was_planned(method, prompt, after, model):
    """Tokens after the prompt are encoded block by block, and fetched; as one prompt they would take a third or twice as much."""
    loaded, meta_model = toy_model(), read_meta_model(model, "float32")
    planned = cache_size(meta_model, method, {}, None, 2, prompt, after)
    assert (planned.refused is not None) == (method in FITTED)
    if method in FITTED:
        assert "or --artifact FILE, from `calib fit" in planned.refused  # test_plan.py has a fitted one
        return
    with compress(loaded, method) as cache, torch.no_grad():
        for tokens in (prompt, *[1] * after):
            loaded(torch.randint(3, 64, (2, tokens)), past_key_values=cache)
        found = cache.memory()
    assert planned.device == pytest.approx(found.measured_bytes, rel=MEMORY, abs=64)  # abs: the table of rows' pages
    assert planned.host == pytest.approx(found.host_bytes, rel=MEMORY)


@pytest.mark.full
def test_an_evaluation_asks_and_holds_what_was_planned(model, tmp_path):
    plan = planned("eval", tmp_path, model, EVALUATION)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob("runs"))
    found = run("eval", tmp_path, model, EVALUATION)
    assert plan["cells"] == len(found["cells"]) == 18
    assert plan["no_tokenizer"] is None
    counts = {cell["column"]: cell["figures"].get("cases", cell["figures"].get("sequences")) for cell in found["cells"]}
    assert {one["title"]: one["rows"] for one in plan["columns"]} == counts
    batches = {one["title"]: -(-one["rows"] // one["batch"]) for one in plan["columns"]}
    measured = {(cell["name"], cell["column"]): cell["sizes"]["measured_bytes"] for cell in found["cells"]}
    for one in plan["caches"]:
        # The rows of the last batch are fewer, and rows of lines differ by some tokens.
        whole = {title: measured[one["name"], title] / batches[title] for title in batches}
        assert max(whole.values()) <= (1 + MEMORY) * one["device_bytes"]
        title = one["column"]
        rows = next(column for column in plan["columns"] if column["title"] == title)
        share = rows["rows"] / (rows["batch"] * batches[title])
        assert measured[one["name"], title] / batches[title] == pytest.approx(one["device_bytes"] * share, rel=0.05)
    assert plan["memory"]["most"]["row"] == "full"
    assert plan["memory"]["most"]["host"] > plan["memory"]["weights"] + plan["memory"]["most"]["cache"]


@pytest.mark.full
def test_a_bench_holds_what_was_planned(model, tmp_path):
    plan = planned("bench", tmp_path, model, BENCH)
    assert not list(tmp_path.glob("out*"))
    found = run("bench", tmp_path, model, BENCH)
    told = {(cell["batch"], cell["context"]): cell for cell in plan["cells"]}
    assert {(cell["batch"], cell["context"]) for cell in found["cells"]} == told.keys() and len(told) == 4
    for row in (row for row in found["cells"] if "sizes" in row):
        one = told[row["batch"], row["context"]]["rows"][row["name"]]
        assert one["device_bytes"] == pytest.approx(row["sizes"]["measured_bytes"], rel=MEMORY), row["name"]
        assert one["host_bytes"] == row["sizes"]["host_bytes"]
        assert one["bits_per_value"] == pytest.approx(row["sizes"]["bits_per_value"], rel=MEMORY)
    for cell in plan["cells"]:
        caches = [one["device_bytes"] + one["host_bytes"] for one in cell["rows"].values()]
        assert len(caches) == 6  # the baseline twice
        assert cell["together"]["host"] == plan["memory"]["weights"] + sum(caches) + cell["beside"]
        assert cell["alone"]["host"] == plan["memory"]["weights"] + max(caches) + cell["beside"]
    for law in plan["largest"]:
        room = 2**26 - plan["memory"]["weights"] - law["fixed"]
        assert law["batch"] == room // law["per_row"] > 3
        own = next(one for one in found["largest"] if (one["name"], one["context"]) == (law["name"], law["context"]))
        assert law["per_row"] > own["cache"]["per_row"]  # activations as well


@pytest.mark.full
def test_nothing_is_loaded_and_a_configuration_is_enough(model, tmp_path, monkeypatch, capsys):
    """Neither weights nor a tokenizer; columns that ask by a chat template, and text that would be sampled."""
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "config.json").write_bytes((save_toy(tmp_path / "whole") / "config.json").read_bytes())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    tasks = [
        {"task": "retrieval", "lines": [2], "cases": 2, "chat_template": True},
        {"task": "needle", "lengths": [200], "cases": 2},
        {"task": "passkey", "lengths": [180], "cases": 1, "new_tokens": 8},
        {"task": "distortion", "length": 64, "sequences": 2},
        {
            "task": "perplexity",
            "prefill": 20,
            "length": 48,
            "tokens": 60,
            "text": str(save_text(tmp_path / "text.txt")),
        },
    ]
    content = {"methods": EVALUATION["methods"][:3] + EVALUATION["methods"][5:], "tasks": tasks}
    plan = planned("eval", tmp_path, str(folder), content)
    shown = capsys.readouterr().out
    assert "tokens are counted with the embedded model's" in " ".join(shown.split()) and plan["no_tokenizer"]
    needle, passkey, distortion = (plan["columns"][at] for at in (1, 2, 3))
    assert needle["rows"] == 10 and 150 < needle["tokens_of_a_row"] <= needle["longest_row"] <= 200
    assert passkey["rows"] == 5 and passkey["longest_row"] < 180 and passkey["tokens_of_a_row"] == passkey["prompt"] + 7
    assert (distortion["methods"], needle["methods"], distortion["forwards"]) == (3, 4, 2)  # no peer has pages
    assert planned("bench", tmp_path, str(folder), {"methods": ["full"], "contexts": [64]})["cells"]


def test_another_device_has_no_time_and_memory_of_its_own(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_time, "usable_device", refuse_cuda)
    plan = planned("eval", tmp_path, model, EVALUATION, "--device", "cuda", "--only", "full")
    assert plan["seconds"] is None and "this machine has no such device" in capsys.readouterr().out
    most, kept = plan["memory"]["most"], plan["memory"]["kept"]
    assert most["host"] == kept > 0 and most["device"] == plan["memory"]["weights"] + most["cache"] + most["beside"]
    offloaded = {**BENCH, "methods": ["full", "offload", {"peer": "offloaded"}]}
    cell = planned("bench", tmp_path, model, offloaded, "--device", "cuda")["cells"][0]
    assert (
        cell["together"]["host"] == cell["rows"]["offload"]["host_bytes"] + cell["rows"]["offloaded"]["host_bytes"] > 0
    )


@pytest.mark.full
def test_llama_2_by_hand(tmp_path, monkeypatch):
    """4 rows of 3,900 tokens and 68 more, which fill 31 pages, on a GPU that is not there; the batch that fits 80 GiB."""
    monkeypatch.setattr(run_time, "usable_device", refuse_cuda)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2))
    asked = {"methods": ["full", "rtn", "kivi", "offload"], "contexts": [3900], "batches": [4], "new_tokens": 68}
    plan = planned("bench", tmp_path, str(tmp_path), {**asked, "memory": "80GiB"}, "--device", "cuda")
    layer, head = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 2 * 32000 * 4096 + 4096
    assert plan["memory"]["weights"] == pytest.approx(2 * (32 * layer + head), rel=1e-6)  # in float16
    (cell,) = plan["cells"]
    values = 4 * 2 * 32 * 32 * 128 * (3900 + 68)  # rows, keys and values, layers, heads, channels, tokens
    rows = {name: one["device_bytes"] for name, one in cell["rows"].items()}
    assert rows["DynamicCache"] == 2 * values and cell["rows"]["offload"]["host_bytes"] == 2 * values
    assert rows["full"] == pytest.approx(2 * values, rel=1e-3)
    assert rows["rtn"] == pytest.approx(4.25 / 8 * values, rel=0.01)
    # KIVI: keys in groups of 32 tokens, the rest of the prompt's and what came in a window of 128; values behind 128 exact ones.
    assert rows["kivi"] == pytest.approx(values / 2 * (3 / 8 * 2 + 2 * (2 - 3 / 8) * 128 / 3968), rel=0.03)
    # The MLP's two inner activations of 4 prompts, at least; logits of their last tokens in float16, float32 and twice float64.
    inner, logits = 2 * 4 * 3900 * 11008 * 2, 4 * 32000 * 22
    assert inner + logits < cell["beside"] < 4 * inner
    largest = {one["name"]: one for one in plan["largest"]}
    for name in ("DynamicCache", "full", "rtn", "kivi"):
        assert largest[name]["per_row"] == pytest.approx((rows[name] + cell["beside"]) / 4, rel=0.02), name
        room = 80 * 2**30 - plan["memory"]["weights"] - largest[name]["fixed"]
        assert largest[name]["batch"] == room // largest[name]["per_row"]


def refuse_cuda(name):
    from calib.errors import UsageError

    raise UsageError(f"no {name}")


@pytest.mark.full
def test_16_bit_weights_that_multiply_in_float32_are_there_twice(model, tmp_path):
    asked = {**EVALUATION, "dtype": "bfloat16"}
    plain, wide = (planned("eval", tmp_path, model, asked, "--products", products) for products in ("model", "float32"))
    linear = [part.weight.numel() for part in toy_model().modules() if type(part) is torch.nn.Linear]
    assert wide["memory"]["weights"] - plain["memory"]["weights"] == 4 * sum(linear)


def test_rows_that_the_model_cannot_have_are_named(model, tmp_path, capsys):
    content = {**EVALUATION, "methods": [{"method": "klt"}, {"name": "theirs", "peer": "hqq"}]}
    plan = planned("eval", tmp_path, model, content)
    shown = capsys.readouterr().out
    assert "Refused: klt: method 'klt' needs calibrated bases" in shown and "<= " in shown
    assert "refused" in plan["caches"][0] and plan["caches"][1]["at_most"]
    alone = {**EVALUATION, "methods": [{"method": "klt"}]}
    assert planned("eval", tmp_path, model, alone)["memory"]["most"] is None
    assert "no row has a cache that can be predicted" in capsys.readouterr().out


def test_several_models(model, tmp_path, capsys):
    content = {key: value for key, value in EVALUATION.items() if key != "batch_size"}
    models = [{"name": "one", "model": model}, {"name": "two", "model": model}]
    file = tmp_path / "asked.yaml"
    file.write_text(yaml.safe_dump({**content, "models": models}))
    words = ["--plan", "--only", "full", "--plan_json", str(tmp_path / "plan.json")]
    assert cli.main(["eval", "--config", str(file), *words]) == 0
    plans, shown = json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out
    assert plans.keys() == {"one", "two"} and plans["one"]["cells"] == 3
    assert "model one:\nPlan of the evaluation" in shown and "\nmodel two:\n" in shown


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        ("eval", ["--plan_json", "x.json"], "'--plan_json' got x.json, but without '--plan' there is no plan to write"),
        (
            "bench",
            ["--plan_json", "x.json"],
            "'--plan_json' got x.json, but without '--plan' there is no plan to write",
        ),
        ("eval", ["--plan", "--fresh"], "'--plan' measures nothing, so '--fresh' would have no effect"),
        ("eval", ["--plan", "--reuse", "x.json"], "'--plan' measures nothing, so '--reuse' would have no effect"),
        ("eval", ["--plan", "--write-cases", "x.json"], "'--plan' measures nothing, so '--write-cases' would"),
        ("eval", ["--plan", "--only", "kiwi"], "--only 'kiwi' fits no method's name"),
        ("eval", ["--plan", "--tasks.perplexity.length", "4000"], "takes 4000 tokens and this model was made for 256"),
        ("eval", ["--plan", "--model", "no/such/model/here"], "is no folder"),
        ("eval", ["--plan", "--artifact", "nowhere.safetensors"], "artifact 'nowhere.safetensors' is no file"),
        ("bench", ["--plan", "--contexts", "4000"], "need 4009 positions, and the model has 256"),
        ("bench", ["--plan", "--artifact", "nowhere.safetensors"], "artifact 'nowhere.safetensors' is no file"),
    ],
)
def test_wrong_words(command, words, text, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ask(command, tmp_path, model, EVALUATION if command == "eval" else BENCH, *words) == 2
    error = capsys.readouterr().err
    assert text in error and error.startswith("calib: error: ") and error.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


@pytest.mark.full
def test_a_plan_that_cannot_be_written(model, tmp_path, capsys):
    assert ask("bench", tmp_path, model, BENCH, "--plan", "--plan_json", str(tmp_path)) == 1
    assert "cannot be written" in capsys.readouterr().err
