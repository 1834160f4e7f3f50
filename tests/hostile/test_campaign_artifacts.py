"""A sample of the campaign of damaged artifacts, and checks that the campaign notices each kind of wrong outcome."""

import pytest
import torch

from calib.runtime import ArtifactError
from tests.hostile import campaign_artifacts
from tests.hostile.campaign_artifacts import campaign, subject

CASES = 120
SECONDS = 20  # wall-clock limit of the sample; a busy machine runs fewer cases


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0])
def test_damaged_artifacts_are_refused_in_one_line_or_used(seed):
    counts = campaign(CASES, seed, seconds=SECONDS)
    assert not counts.wrong, "\n".join(counts.wrong)
    assert counts.refused + counts.accepted == counts.cases > 10
    assert counts.refused and counts.accepted


def test_the_same_case_at_every_call():
    base = subject()[1]
    first, second = (campaign_artifacts.damaged(base, 3, 14) for _ in range(2))
    assert first == second != campaign_artifacts.damaged(base, 3, 15)


def wrong_kinds(monkeypatch, **changes):
    """Replace attributes of the campaign's module and run 12 cases; return the counters that are not 0."""
    for name, change in changes.items():
        monkeypatch.setattr(campaign_artifacts, name, change)
    counts = campaign(12, 0)
    return {kind for kind in ("tracebacks", "hangs", "over_memory", "nan") if getattr(counts, kind)}


def test_a_traceback_is_noticed(monkeypatch):
    def load(path):
        raise RuntimeError("a frame of C++")

    monkeypatch.setattr(campaign_artifacts.Artifact, "load", load)
    assert wrong_kinds(monkeypatch) == {"tracebacks"}


@pytest.mark.parametrize("line", ["two\nlines", "\x1b[31m", "x" * 401])
def test_a_line_that_is_none_is_noticed(monkeypatch, line):
    def load(path):
        raise ArtifactError(line)

    monkeypatch.setattr(campaign_artifacts, "OURS", ("/",))
    monkeypatch.setattr(campaign_artifacts.Artifact, "load", load)
    assert wrong_kinds(monkeypatch) == {"tracebacks"}


def test_what_never_ends_is_noticed(monkeypatch):
    def load(path):
        while True:
            pass

    monkeypatch.setattr(campaign_artifacts.Artifact, "load", load)
    assert wrong_kinds(monkeypatch, SECONDS=0.05) == {"hangs"}


def test_memory_is_noticed(monkeypatch):
    def load(path):
        return bytearray(2**33)

    monkeypatch.setattr(campaign_artifacts.Artifact, "load", load)
    assert wrong_kinds(monkeypatch) == {"over_memory"}


def test_nan_is_noticed(monkeypatch):
    model, base = subject()
    broken = type(model)(model.config).eval()
    broken.load_state_dict(model.state_dict())
    broken.lm_head.weight.data.fill_(float("nan"))
    assert wrong_kinds(monkeypatch, subject=lambda dtype=None: (broken, base)) == {"nan"}
