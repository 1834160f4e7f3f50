"""The largest batch: bytes are linear in batch rows, the batch computed from them fits, and on a GPU batches near it are tried."""

import gc
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import yaml
from tolerances import MEMORY
from toy_language_model import save_toy

from calib import cli
from calib.bench import interleave, largest_batch
from calib.bench.bench_model import prepare
from calib.bench.cache_bytes import CacheBytes, measure_alone
from calib.bench.largest_batch import Law, largest, laws, tried
from calib.bench.open_cache import OpenCache
from calib.bench.peak import Peak
from calib.bench.request import BenchRequest
from calib.evaluate.cache_size import CacheSize

METHODS = [
    {"method": "full"},
    {"method": "kivi", "bits": 2},
    {"method": "zipcache"},
    {"method": "gear"},
    {"method": "h2o"},
    {"method": "offload"},
]
CONTEXT = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def bench_model(folder):
    content = {"model": folder, "methods": METHODS, "contexts": [CONTEXT], "new_tokens": 4, "turns": 2}
    return prepare(BenchRequest.of({**content, "memory": "64MiB"}, "toy"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Time without the pause for other threads, and let `gc.collect()` skip all that pytest holds."""
    monkeypatch.setattr(interleave, "PAUSE", 0)
    gc.freeze()
    yield
    gc.unfreeze()


def entry_of(bench_model, label):
    return next(entry for entry in bench_model.request.methods if entry.label == label)


@pytest.mark.parametrize("label", [item["method"] for item in METHODS])
def test_bytes_of_a_larger_batch_follow_from_two_small_ones(bench_model, label):
    one, two, seven = (
        measure_alone(bench_model, entry_of(bench_model, label), bench_model.prompt(batch, CONTEXT))
        for batch in (1, 2, 7)
    )
    for sizes in (
        [found.cache(on_gpu=False) for found in (one, two, seven)],
        [found.size.predicted_bytes + found.size.host_bytes for found in (one, two, seven)],
    ):
        assert sizes[0] < sizes[1] and Law.through(*sizes[:2]).at(7) == pytest.approx(sizes[2], rel=MEMORY)


def test_the_computed_batch_fits_and_one_more_does_not(bench_model, monkeypatch):
    monkeypatch.setattr(Peak, "begin", lambda peak: False)  # use the cache: a small model's peak is mostly noise
    entry = entry_of(bench_model, "kivi")
    sizes = {
        batch: measure_alone(bench_model, entry, bench_model.prompt(batch, CONTEXT)).size.measured_bytes
        for batch in (5, 6)
    }
    limit = bench_model.weights + (sizes[5] + sizes[6]) // 2
    asked = prepared(bench_model, limit)
    found = largest(asked, entry, CONTEXT, {}, lambda name: None)
    assert (found["computed"], found["by"], found["peak"], found["tried"]) == (5, "cache", None, None)


def prepared(bench_model, memory, peak=None):
    """Return the bench model with another memory limit and, if given, with `peak` to report its memory peaks."""
    other = replace(bench_model, request=replace(bench_model.request, memory=memory))
    if peak is not None:
        other.__dict__["peak"] = peak
    return other


def test_batches_of_the_grid_are_not_run_again(bench_model, monkeypatch):
    entry = entry_of(bench_model, "full")
    known = {
        ("full", batch, CONTEXT): measure_alone(bench_model, entry, bench_model.prompt(batch, CONTEXT))
        for batch in (1, 2, 4)
    }
    monkeypatch.setattr(largest_batch, "measure_alone", None)
    assert largest(bench_model, entry, CONTEXT, known, lambda name: None)["computed"] > 2


def cache_bytes(measured, host=0, peak=None):
    return CacheBytes(CacheSize(measured, 1.0, host_bytes=host), peak, None)


def test_the_peak_counts_where_it_tells_something():
    assert laws(cache_bytes(10), cache_bytes(15), True) == (Law(5, 5), None)
    assert laws(cache_bytes(10, peak=100), cache_bytes(15, peak=120), True) == (Law(5, 5), Law(80, 20))
    assert laws(cache_bytes(10, peak=100), cache_bytes(15, peak=104), True) == (
        Law(5, 5),
        None,
    )  # less than the cache itself
    assert laws(cache_bytes(10, host=1), cache_bytes(15, host=4), True)[0] == Law(5, 5)
    assert laws(cache_bytes(10, host=1), cache_bytes(15, host=4), False)[0] == Law(3, 8)  # host memory counts on a CPU
    assert CacheBytes(CacheSize(1, 1.0), 5, 7).peak == CacheBytes(CacheSize(1, 1.0), 7, None).peak == 7
    assert [Law(10, 5).largest(room) for room in (-3, 14, 15, 24, 25)] == [0, 0, 1, 2, 3]


class Process(Peak):
    """A CPU process with a made-up peak: 10 MB, 1 MB for each batch row of the prompt, and the noise of that run."""

    def __init__(self, device, noise):
        super().__init__(device)
        self.noise, self.rows = iter(noise), 0

    def settle(self):
        self.up = next(self.noise, 0)

    def held(self):
        return 0

    def begin(self):
        return True

    def highest(self):
        return 10_000_000 + 1_000_000 * self.rows + self.up


@pytest.mark.parametrize(
    ("noise", "by", "computed"),
    [((0, 0, 0), "peak", 20), ((0, 900_000, 0), "cache", None), ((0, 0, 400_000), "cache", None)],
)
def test_on_a_cpu_no_batch_is_computed_from_noise(bench_model, monkeypatch, noise, by, computed):
    peak, prefill = Process(bench_model.device, noise), OpenCache.prefill

    def counted(row):
        peak.rows = len(row.prompt)
        return prefill(row)

    monkeypatch.setattr(OpenCache, "prefill", counted)
    asked = prepared(bench_model, bench_model.weights + 30_500_000, peak)
    found = largest(asked, entry_of(bench_model, "kivi"), CONTEXT, {}, lambda name: None)
    assert found["by"] == by and (found["peak"] is None) == (by == "cache")
    assert computed in (None, found["computed"])


@pytest.mark.parametrize(
    ("computed", "room", "most", "batches"),
    [
        (5, 5, 5, [5, 6]),
        (5, 6, 6, [5, 6]),
        (64, 70, 66, [64, 66]),  # a step is two here
        (5, 3, 2, [5, 4, 2]),
        (64, 61, 58, [64, 62, 58]),
        (3, 0, 0, [3, 2, 1]),
        (0, 9, 2, [1, 2]),
        (0, 0, 0, [1]),
    ],
)
def test_tries_go_down_until_one_fits_and_else_one_step_up(computed, room, most, batches):
    found, tries = tried(lambda batch: batch <= room, computed)
    assert found == most and [step["batch"] for step in tries] == batches
    assert [step["fits"] for step in tries] == [batch <= room for batch in batches]


class MadeUp(Peak):
    """A GPU's allocator with a made-up peak: 10 MB, and 1 MB for each batch row of the last prompt."""

    on_gpu = True
    rows = 0

    def settle(self):
        self.rows = 0

    def held(self):
        return 0

    def begin(self):
        return True

    def highest(self):
        return 10_000_000 + 1_000_000 * self.rows


def test_on_a_gpu_the_computed_batch_is_tried_under_the_limit(bench_model, monkeypatch):
    entry, peak, limits = entry_of(bench_model, "kivi"), MadeUp(bench_model.device), []
    prefill = OpenCache.prefill

    def crowded(row):
        peak.rows = len(row.prompt)
        if limits and peak.rows > 3:
            raise torch.OutOfMemoryError("no room")
        return prefill(row)

    @contextmanager
    def limited(device, limit):
        limits.append(limit)
        yield

    monkeypatch.setattr(OpenCache, "prefill", crowded)
    monkeypatch.setattr(largest_batch, "limited", limited)
    asked = prepared(bench_model, bench_model.weights + 15_500_000, peak)
    found = largest(asked, entry, CONTEXT, {}, lambda name: None)
    assert limits == [asked.request.memory]
    assert found["peak"] == {"fixed": 10_000_000, "per_row": 1_000_000}
    assert (found["by"], found["computed"], found["tried"]) == ("peak", 5, 2)
    assert found["tries"] == [{"batch": n, "fits": n == 2} for n in (5, 4, 2)]


def test_a_try_that_fails_otherwise_is_told(bench_model, monkeypatch):
    monkeypatch.setattr(largest_batch, "limited", lambda device, limit: pytest.fail("no try before two batches ran"))

    def broken(row):
        raise RuntimeError("a wrong shape")

    monkeypatch.setattr(OpenCache, "prefill", broken)
    found = largest(bench_model, entry_of(bench_model, "full"), CONTEXT, {}, lambda name: None)
    assert found == {
        "name": "full",
        "context": CONTEXT,
        "error": "RuntimeError: a wrong shape",
        "out_of_memory": False,
    }


@pytest.mark.full
def test_a_limit_that_holds_no_row_is_said(folder, tmp_path, capsys):
    content = {
        "model": folder,
        "methods": METHODS[:2],
        "contexts": [40],
        "new_tokens": 2,
        "turns": 2,
        "baseline": "full",
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    words = ["bench", "--config", str(tmp_path / "small.yaml"), "--output", str(tmp_path / "out"), "--memory"]
    assert cli.main([*words, "16KiB"]) == 0
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["name"], row["computed"]) for row in document["largest"]] == [("full", 0), ("kivi", 0)]
    said = "kivi, 40 tokens: not even a batch of 1 fits into 16.00 KiB; it takes "
    assert said in capsys.readouterr().out
    assert all(said in (tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    assert cli.main([*words, "1GiB"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## Largest batch in 1.00 GiB" in text and "not even" not in text


def test_the_process_tells_its_peak(tmp_path, monkeypatch):
    peak = Peak(torch.device("cpu"))
    peak.settle()
    before = peak.held()
    assert peak.begin()
    torch.ones(2**26).sum()  # 256 MiB, freed at once
    highest = peak.highest()
    assert highest - before == pytest.approx(2**28, rel=0.1)  # the system counts by the hundred pages
    peak.settle()
    assert peak.begin() and peak.highest() < highest - 2**27
    monkeypatch.setattr("calib.bench.peak.PROCESS", tmp_path / "nowhere")
    assert not peak.begin() and peak.highest() is None and peak.held() is None
