"""`calib bench`: the files of a run, the order of its rows, times and ratios under a made-up clock, and rows that fail."""

import gc
import json
import weakref

import pytest
import torch
import yaml
from tolerances import MEMORY
from toy_language_model import save_toy

from calib import cli
from calib.bench import cell as cells
from calib.bench import interleave
from calib.bench.open_cache import OpenCache

METHODS = [
    {"name": "all", "method": "full"},
    {"name": "rtn-2", "method": "rtn", "bits": 2},
    {"group": "Windows"},
    {"name": "kivi", "method": "kivi", "residual": {"40 tokens": 32, "72 tokens": 64}},
]
NAMES = ["all", "rtn-2", "kivi", "all again"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Time without the pause for other threads, and let `gc.collect()` skip all that pytest holds."""
    monkeypatch.setattr(interleave, "PAUSE", 0)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def bench(model, tmp_path, monkeypatch):
    """A function that runs a small configuration with changes and returns the exit status and the content of results.json."""

    def run(*words, **changes):
        content = {"model": model, "contexts": [40, 72], "new_tokens": 5, "turns": 2, "seed": 3, "methods": METHODS}
        content["baseline"] = "all"
        file = tmp_path / "small.yaml"
        file.write_text(yaml.safe_dump(content | changes))
        status = cli.main(["bench", "--config", str(file), "--output", str(tmp_path / "out"), *words])
        results = tmp_path / "out" / "results.json"
        return status, json.loads(results.read_text()) if results.exists() else None

    return run


def rows(document, **where):
    return [row for row in document["cells"] if where.items() <= row.items()]


@pytest.mark.full
def test_a_run_writes_every_row_and_three_files(bench, tmp_path, capsys):
    status, document = bench(batches=[1, 3])
    assert status == 0
    wanted = [(name, batch, context) for context in (40, 72) for batch in (1, 3) for name in NAMES]
    assert [(row["name"], row["batch"], row["context"]) for row in document["cells"]] == wanted
    assert [row["options"]["residual"] for row in rows(document, name="kivi")] == [32, 32, 64, 64]
    assert {row["group"] for row in rows(document, name="kivi")} == {"Windows"}
    for row in document["cells"]:
        taken = row["seconds"]
        assert set(taken) == {"prefill", "first_token", "decode"} and all(low > 0 for low, _, _ in taken.values())
        assert taken["first_token"][1] > taken["prefill"][1]
        assert row["tokens_per_second"] == sorted(row["tokens_per_second"])
        assert set(row["speedup"]) == (set() if row["name"] == "all" else set(taken))
        assert ("sizes" in row) is (row["name"] != "all again")
    for row in (row for row in document["cells"] if "sizes" in row):
        sizes = row["sizes"]
        assert sizes["predicted_bytes"] == pytest.approx(sizes["measured_bytes"], rel=MEMORY)
    bits = [rows(document, name=name, batch=3, context=72)[0]["sizes"]["bits_per_value"] for name in NAMES[:3]]
    assert bits[0] > 32 > bits[2] > bits[1] > 2  # float32, with pages that are not full
    assert document["largest"] == [] and document["config"]["baseline"] == "all"
    assert document["model"]["bytes"] > 0 and document["versions"]["torch"] == torch.__version__
    text, shown = (tmp_path / "out" / "report.md").read_text(), capsys.readouterr().out
    for title in ("1 x 40 tokens", "3 x 72 tokens"):
        assert f"## {title}" in text and f"## Memory, {title}" in text and title in shown
    assert "| all again |" in text and "Largest" not in text
    assert str(tmp_path) not in json.dumps(document["cells"]) and not list((tmp_path / "out").glob("*.tmp"))


class Clock:
    """A clock that advances only by made-up seconds of the rows' work; decoding takes longer in each later turn."""

    OPENING, TOKEN = 0.25, {"all": 2.0, "rtn-2": 1.0, "kivi": 8.0}

    def __init__(self, monkeypatch):
        self.now, self.turn, self.slow = 0.0, 1.0, 1.0
        opened, prefilled, decoded = OpenCache.__init__, OpenCache.prefill, OpenCache.decode

        def opening(row, *given):
            opened(row, *given)
            self.now += self.OPENING

        def prefilling(row):
            self.now += self.TOKEN[row.entry.label] * row.prompt.shape[1]
            return prefilled(row)

        def decoding(row, steps):
            self.now += self.TOKEN[row.entry.label] * steps * self.turn * self.slow
            return decoded(row, steps)

        for name, what in (("__init__", opening), ("prefill", prefilling), ("decode", decoding)):
            monkeypatch.setattr(OpenCache, name, what)
        monkeypatch.setattr(interleave, "clock", lambda: self.now)

        def interleaved(seed, count, names, real=interleave.interleaved):
            for turn, name in real(seed, count, names):
                self.turn = turn + 1.0
                yield turn, name

        monkeypatch.setattr(interleave, "interleaved", interleaved)


@pytest.mark.full
def test_times_are_the_clocks_and_ratios_are_taken_turn_by_turn(bench, monkeypatch):
    Clock(monkeypatch)
    _, document = bench(contexts=[40], batches=[3], methods=[*METHODS[:2], {"name": "kivi", "method": "kivi"}], turns=3)
    for name, token in Clock.TOKEN.items():
        (row,) = rows(document, name=name)
        assert row["seconds"]["prefill"] == pytest.approx([40 * token] * 3)
        assert row["seconds"]["first_token"] == pytest.approx([40 * token + Clock.OPENING] * 3)
        assert row["seconds"]["decode"] == pytest.approx([1.5 * token, 2 * token, 2.5 * token])  # a step, of 1, 2 and 3
        assert row["tokens_per_second"] == pytest.approx([3 / token / n for n in (2.4, 2, 4 / 3)])
        if name != "all":
            assert row["speedup"]["prefill"] == row["speedup"]["decode"] == pytest.approx([2 / token] * 3)
    (again,) = rows(document, name="all again")
    assert again["speedup"]["decode"] == [1.0] * 3


def test_another_baseline(bench, monkeypatch):
    Clock(monkeypatch)
    methods = [*METHODS[:2], {"name": "kivi", "method": "kivi"}]
    _, document = bench("--baseline", "kivi", contexts=[40], methods=methods)
    assert [row["name"] for row in document["cells"]] == ["kivi", "all", "rtn-2", "kivi again"]
    assert rows(document, name="all")[0]["speedup"]["decode"] == pytest.approx([4.0] * 3)


@pytest.mark.full
def test_rows_take_turns_in_another_order_each_time(bench, monkeypatch):
    calls, decoded = [], OpenCache.decode

    def recorded(row, steps):
        calls.append((id(row), row.entry.label, steps, row.cache.get_seq_length()))
        return decoded(row, steps)

    monkeypatch.setattr(OpenCache, "decode", recorded)
    bench(contexts=[40], new_tokens=6, turns=3)
    together = calls[-16:]  # a step of each row that warms up, then three turns of two steps
    assert [steps for _, _, steps, _ in together] == [1] * 4 + [2] * 12
    found = [together[at : at + 4] for at in range(4, 16, 4)]
    assert all(len({row for row, *_ in turn}) == 4 for turn in found)  # each of them once a turn
    assert [{length for *_, length in turn} for turn in found] == [{41}, {43}, {45}]
    assert len({tuple(row for row, *_ in turn) for turn in found}) > 1


def failing(monkeypatch, error, label="rtn-2", context=72, when=lambda row: True):
    """Make forwards of row `label` at `context` raise `error` after they have run; return weak references to all rows' caches."""
    forward, caches = OpenCache.forward, []

    def raising(row, tokens):
        caches.append(weakref.ref(row.cache))
        if row.entry.label == label and row.prompt.shape[1] == context and when(row):
            forward(row, tokens)  # something is held by then
            raise type(error)(*error.args)
        return forward(row, tokens)

    monkeypatch.setattr(OpenCache, "forward", raising)
    return caches


@pytest.mark.full
@pytest.mark.parametrize("late", [False, True])
def test_a_row_out_of_memory_is_told_and_freed(bench, monkeypatch, capsys, tmp_path, late):
    error = torch.OutOfMemoryError("CUDA out of memory. | Tried to\nallocate 9 GiB")
    seen = []
    caches = failing(monkeypatch, error, when=lambda row: not late or seen.append(0) or len(seen) > 8)
    status, document = bench()
    assert status == 0
    (lost,) = [row for row in document["cells"] if "error" in row]
    assert (lost["name"], lost["context"], lost["out_of_memory"]) == ("rtn-2", 72, True)
    assert lost["error"] == "OutOfMemoryError: CUDA out of memory. | Tried to allocate 9 GiB" and "seconds" not in lost
    assert all(row["speedup"] for row in rows(document, context=72) if row["name"] in ("kivi", "all again"))
    assert "calib: rtn-2, 1 x 72 tokens: out of memory: OutOfMemoryError" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>out of memory</td>" in page and "Tried to allocate 9 GiB" in page
    gc.collect()
    assert len(caches) > 50 and not any(cache() for cache in caches)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("no room"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out of memory"),
        (RuntimeError("a wrong shape"), "failed"),
    ],
)
def test_what_is_want_of_memory_and_what_is_not(bench, monkeypatch, capsys, error, said):
    failing(monkeypatch, error, context=40)
    status, _ = bench(contexts=[40])
    assert status == (said == "failed")
    assert f"calib: rtn-2, 1 x 40 tokens: {said}: {type(error).__name__}" in capsys.readouterr().out


def test_without_its_baseline_the_others_are_still_measured(bench, monkeypatch):
    failing(monkeypatch, torch.OutOfMemoryError("full"), label="all", context=40)
    _, document = bench(contexts=[40])
    assert [row["name"] for row in document["cells"] if "error" in row] == ["all", "all again"]
    assert [row["speedup"] for row in document["cells"] if "seconds" in row] == [{}, {}]


def test_a_baseline_that_fails_between_two_prefills_leaves_the_others_without_ratios(bench, monkeypatch):
    prefills, prefill = [], OpenCache.prefill

    def raising(row):
        prefills.extend([0] if row.entry.label == "all" else [])
        if (
            row.entry.label == "all" and len(prefills) > 4
        ):  # warm-up, alone, and the first turn of it and of "all again"
            raise torch.OutOfMemoryError("full")
        return prefill(row)

    monkeypatch.setattr(OpenCache, "prefill", raising)
    status, document = bench(contexts=[40])
    assert status == 0
    assert [row["name"] for row in document["cells"] if "error" in row] == ["all", "all again"]
    assert [row["speedup"] for row in document["cells"] if "seconds" in row] == [{}, {}]


@pytest.mark.full
def test_logits_that_are_no_numbers_fail_the_row(bench, monkeypatch):
    forward = OpenCache.forward
    monkeypatch.setattr(
        OpenCache, "forward", lambda row, tokens: forward(row, tokens) * (torch.nan if row.entry.label == "kivi" else 1)
    )
    status, document = bench(contexts=[40])
    assert status == 1
    assert {row["name"]: row["error"] for row in document["cells"] if "error" in row} == {
        "kivi": "RunError: the model's logits are not finite"
    }


@pytest.mark.full
def test_caches_that_do_not_fit_together_are_measured_in_smaller_groups(bench, monkeypatch):
    groups, together, clock = [], cells.Cell.together, Clock(monkeypatch)

    def crowded(cell, names):
        groups.append(list(names))
        clock.slow *= 2  # as if the machine became slower before the next group
        if len(names) > 2 or "rtn-2" in names[1:]:
            raise torch.OutOfMemoryError("too many")
        return together(cell, names)

    monkeypatch.setattr(cells.Cell, "together", crowded)
    status, document = bench(contexts=[40])
    assert status == 0 and not any("error" in row for row in document["cells"])
    assert groups == [
        NAMES,
        ["all", "rtn-2"],
        ["all"],
        ["rtn-2"],
        ["all", "kivi", "all again"],
        ["all", "kivi"],
        ["all", "all again"],
    ]
    found = {row["name"]: sorted(row["speedup"]) for row in document["cells"]}
    whole = ["decode", "first_token", "prefill"]
    # A row that is measured alone has no decode of the baseline to compare with.
    assert found == {"all": [], "rtn-2": whole[1:], "kivi": whole, "all again": whole}
    assert [rows(document, name=name)[0]["speedup"]["decode"] for name in ("kivi", "all again")] == [
        [0.25] * 3,
        [1.0] * 3,
    ]


def test_a_peer_attends_as_it_does_without_us(bench, monkeypatch):
    seen, forward = {}, OpenCache.forward

    def recorded(row, tokens):
        before = row.bench_model.model.config._attn_implementation_internal
        real, held = row.bench_model.model.forward, []

        def inside(*given, **named):
            held.append(row.bench_model.model.config._attn_implementation_internal)
            return real(*given, **named)

        with monkeypatch.context() as patched:
            patched.setattr(row.bench_model.model, "forward", inside)
            logits = forward(row, tokens)
        assert row.bench_model.model.config._attn_implementation_internal == before
        seen.setdefault(row.entry.label, set()).update(held)
        return logits

    monkeypatch.setattr(OpenCache, "forward", recorded)
    methods = [{"name": "all", "method": "full"}, {"name": "theirs", "peer": "dynamic"}]
    _, document = bench(contexts=[40], batches=[2], methods=methods)
    assert seen == {"all": {"calib_packed"}, "theirs": {"sdpa"}}
    theirs = rows(document, name="theirs")[0]
    values = 2 * 45 * 3 * 2 * 2 * 32  # rows, tokens, layers, keys and values, heads, channels
    assert theirs["sizes"]["measured_bytes"] == 4 * values and theirs["sizes"]["bits_per_value"] == 32
    assert theirs["sizes"]["predicted_bytes"] is None and theirs["speedup"]["decode"][1] > 0


def test_without_a_configuration(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", model, "--methods", "full", "{name: r, method: rtn, bits: 2}", "--contexts", "24"]
    assert cli.main(["bench", *words, "--new-tokens=2", "--turns", "2"]) == 0
    document = json.loads((tmp_path / "runs" / "bench" / "bench" / "results.json").read_text())
    assert [row["name"] for row in document["cells"]] == ["DynamicCache", "full", "r", "DynamicCache again"]
    assert document["config"]["baseline"] == "DynamicCache" and document["cells"][0]["method"] == "peer dynamic"
    assert document["config"]["contexts"] == [24] and document["config"]["new_tokens"] == 2
