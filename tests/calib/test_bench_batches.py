"""The largest batch: bytes really are linear in rows, the batch computed from that fits, and what a GPU's tries do."""

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
from calib.bench import largest_batch, turns
from calib.bench.largest_batch import Law, largest, laws, tried
from calib.bench.open_row import OpenRow
from calib.bench.peak import Peak
from calib.bench.request import BenchRequest
from calib.bench.subject import prepare
from calib.bench.weighing import Weighed, weigh
from calib.evaluate.weight import Weight

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
def subject(folder):
    content = {"model": folder, "methods": METHODS, "contexts": [CONTEXT], "new_tokens": 4, "turns": 2}
    return prepare(BenchRequest.of({**content, "memory": "64MiB"}, "toy"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """No wait for threads to sleep; and garbage is not looked for among all that pytest holds."""
    monkeypatch.setattr(turns, "PAUSE", 0)
    gc.freeze()
    yield
    gc.unfreeze()


def entry_of(subject, label):
    return next(entry for entry in subject.request.methods if entry.label == label)


@pytest.mark.parametrize("label", [item["method"] for item in METHODS])
def test_bytes_of_a_larger_batch_follow_from_two_small_ones(subject, label):
    one, two, seven = (weigh(subject, entry_of(subject, label), subject.prompt(batch, CONTEXT)) for batch in (1, 2, 7))
    for sizes in (
        [found.cache(on_gpu=False) for found in (one, two, seven)],
        [found.weight.predicted_bytes + found.weight.host_bytes for found in (one, two, seven)],
    ):
        assert sizes[0] < sizes[1] and Law.through(*sizes[:2]).at(7) == pytest.approx(sizes[2], rel=MEMORY)


def test_the_computed_batch_fits_and_one_more_does_not(subject, monkeypatch):
    monkeypatch.setattr(Peak, "begin", lambda peak: False)  # by the cache: a small model's peak is mostly noise
    entry = entry_of(subject, "kivi")
    sizes = {batch: weigh(subject, entry, subject.prompt(batch, CONTEXT)).weight.measured_bytes for batch in (5, 6)}
    limit = subject.weights + (sizes[5] + sizes[6]) // 2
    asked = prepared(subject, limit)
    found = largest(asked, entry, CONTEXT, {}, lambda name: None)
    assert (found["computed"], found["by"], found["peak"], found["tried"]) == (5, "cache", None, None)


def prepared(subject, memory, peak=None):
    """The same model with another limit, and where it is asked for with a device that tells other peaks."""
    other = replace(subject, request=replace(subject.request, memory=memory))
    if peak is not None:
        other.__dict__["peak"] = peak
    return other


def test_batches_of_the_grid_are_not_run_again(subject, monkeypatch):
    entry = entry_of(subject, "full")
    known = {("full", batch, CONTEXT): weigh(subject, entry, subject.prompt(batch, CONTEXT)) for batch in (1, 2)}
    monkeypatch.setattr(largest_batch, "weigh", None)
    assert largest(subject, entry, CONTEXT, known, lambda name: None)["computed"] > 2


def weighed(measured, host=0, peak=None):
    return Weighed(Weight(measured, 1.0, host_bytes=host), peak, None)


def test_the_peak_counts_where_it_tells_something():
    assert laws(weighed(10), weighed(15), True) == (Law(5, 5), None)
    assert laws(weighed(10, peak=100), weighed(15, peak=120), True) == (Law(5, 5), Law(80, 20))
    assert laws(weighed(10, peak=100), weighed(15, peak=104), True) == (Law(5, 5), None)  # less than the cache itself
    assert laws(weighed(10, host=1), weighed(15, host=4), True)[0] == Law(5, 5)
    assert laws(weighed(10, host=1), weighed(15, host=4), False)[0] == Law(3, 8)  # the same memory on a CPU
    assert Weighed(Weight(1, 1.0), 5, 7).peak == Weighed(Weight(1, 1.0), 7, None).peak == 7
    assert [Law(10, 5).largest(room) for room in (-3, 14, 15, 24, 25)] == [0, 0, 1, 2, 3]


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
    """A GPU's allocator as far as the tries ask it: 10 MB and 1 MB for each row of the last prompt."""

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


def test_on_a_gpu_the_computed_batch_is_tried_under_the_limit(subject, monkeypatch):
    entry, peak, limits = entry_of(subject, "kivi"), MadeUp(subject.device), []
    prefill = OpenRow.prefill

    def crowded(row):
        peak.rows = len(row.prompt)
        if limits and peak.rows > 3:
            raise torch.OutOfMemoryError("no room")
        return prefill(row)

    @contextmanager
    def limited(device, limit):
        limits.append(limit)
        yield

    monkeypatch.setattr(OpenRow, "prefill", crowded)
    monkeypatch.setattr(largest_batch, "limited", limited)
    asked = prepared(subject, subject.weights + 15_500_000, peak)
    found = largest(asked, entry, CONTEXT, {}, lambda name: None)
    assert limits == [asked.request.memory]
    assert found["peak"] == {"fixed": 10_000_000, "per_row": 1_000_000}
    assert (found["by"], found["computed"], found["tried"]) == ("peak", 5, 2)
    assert found["tries"] == [{"batch": n, "fits": n == 2} for n in (5, 4, 2)]


def test_a_try_that_fails_otherwise_is_told(subject, monkeypatch):
    monkeypatch.setattr(largest_batch, "limited", lambda device, limit: pytest.fail("no try before two batches ran"))

    def broken(row):
        raise RuntimeError("a wrong shape")

    monkeypatch.setattr(OpenRow, "prefill", broken)
    found = largest(subject, entry_of(subject, "full"), CONTEXT, {}, lambda name: None)
    assert found == {
        "name": "full",
        "context": CONTEXT,
        "error": "RuntimeError: a wrong shape",
        "out_of_memory": False,
    }


def test_a_limit_that_holds_no_row_is_said(folder, tmp_path, capsys):
    content = {"model": folder, "methods": METHODS[:2], "contexts": [40], "new_tokens": 2, "turns": 2}
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
    torch.ones(2**26).sum()  # 256 MiB, and gone again
    highest = peak.highest()
    assert highest - before == pytest.approx(2**28, rel=0.1)  # the system counts by the hundred pages
    peak.settle()
    assert peak.begin() and peak.highest() < highest - 2**27
    monkeypatch.setattr("calib.bench.peak.PROCESS", tmp_path / "nowhere")
    assert not peak.begin() and peak.highest() is None and peak.held() is None
