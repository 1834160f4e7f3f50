"""One case of the campaign of kills (`campaign_kills.py`), and checks that it counts each kind of failure."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign_kills import Counts, campaign, judge


@pytest.mark.full
def test_fits_that_are_killed_come_to_the_same_bytes(tmp_path):
    counts = campaign(1, 7, tmp_path)
    assert counts.clean, counts.failures
    assert counts.kills >= 1


@pytest.mark.parametrize(
    ("sent", "status", "errors", "count"),
    [
        (15, 0, "calib: interrupted by SIGTERM; go on with: calib fit --ckpt_path last\n", "wrong_lines"),
        (15, 1, "", "wrong_status"),
        (15, 0, "", "wrong_status"),
        (2, 130, "", "wrong_lines"),
        (2, 130, "calib: interrupted by SIGINT; go on with: calib fit --ckpt_path last\nTraceback ...", "tracebacks"),
        (9, None, "", "hangs"),
        (0, 143, "", "wrong_status"),
        (2, -2, "", "wrong_status"),
    ],
)
def test_the_campaign_sees_what_is_wrong(sent, status, errors, count):
    counts = Counts()
    judge(counts, "case", sent, status, errors)
    assert getattr(counts, count) == 1
    fine = Counts()
    judge(fine, "case", 2, -2, "", done=True)
    judge(fine, "case", 15, 143, "calib: interrupted by SIGTERM; go on with: calib fit --ckpt_path last\n")
    assert not fine.failures
