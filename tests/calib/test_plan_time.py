"""The time of a plan is a range, and the plan says so if other processes kept the machine busy meanwhile."""

import os

import pytest

from calib.plan import duration, neighbours, plan, text
from calib.plan.neighbours import Neighbours, watched
from calib.plan.probe import Pace

TICKS = os.sysconf("SC_CLK_TCK")


def counters(busy, idle):
    return f"cpu  {busy} 0 0 {idle} 0 0 0 0 7 7\ncpu0 1 2 3\n"


@pytest.mark.parametrize(
    ("busy", "idle", "own", "share"), [(300, 100, 1.0, 0.5), (100, 300, 1.0, 0.0), (400, 0, 0.0, 1.0)]
)
def test_what_others_used_is_all_but_ones_own(tmp_path, monkeypatch, busy, idle, own, share):
    spent = iter([2.0, 2.0 + own])
    monkeypatch.setattr(neighbours, "COUNTERS", tmp_path / "stat")
    monkeypatch.setattr(neighbours, "own_seconds", lambda: next(spent))
    (tmp_path / "stat").write_text(counters(1000, 500))
    with watched() as found:
        (tmp_path / "stat").write_text(counters(1000 + busy * TICKS // 100, 500 + idle * TICKS // 100))
    assert found.share == pytest.approx(share, abs=0.02)
    assert found.busy == (share > neighbours.BUSY)


def test_where_the_system_does_not_tell_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "COUNTERS", tmp_path / "nowhere")
    with watched() as found:
        pass
    assert found.share is None and not found.busy


class Told:
    """A fit whose extrapolated time is 100 s."""

    calibration = meta_model = sizes = None

    def seconds(self, pace):
        return {"statistics": 60.0, "clip": 40.0}


@pytest.mark.parametrize(("share", "words"), [(None, "40.0 s to 2 min 10 s"), (0.5, "20.0 s to 2 min 10 s")])
def test_the_text_has_the_range_and_the_neighbours(monkeypatch, share, words):
    monkeypatch.setattr(plan, "measured_pace", lambda *_: Pace(tokens=5))
    found = watched_as(share)
    monkeypatch.setattr(duration, "watched", found)
    told = " ".join(text.times({"seconds": plan.seconds_content(Told(), "cpu")}).split())
    assert f"Time: {words}. The extrapolation is 1 min 40 s, from" in told
    assert ("The machine was busy: other processes used 50% of its processors" in told) == (share is not None)


def watched_as(share):
    class Watched:
        def __enter__(self):
            return Neighbours(share)

        def __exit__(self, *error):
            return None

    return Watched
