"""docs/results/hostile.md follows from the stored run; the run is complete and clean; counts that must be 0 are checked."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from report import PAGE, RUN, page, wrong


@pytest.fixture
def found():
    return json.loads(RUN.read_text())


def test_the_page_is_that_of_the_run(found):
    assert PAGE.read_text() == page(found)


def test_the_run_is_whole_and_clean(found):
    assert found["artifacts"]["cases"] >= 10_000
    assert found["blobs"]["cases"] >= 10_000
    assert found["prefixes"]["cases"] >= 3_000 and found["kills"]["cases"] >= 50
    assert wrong(found) == []


@pytest.mark.parametrize(
    ("part", "kind"), [("artifacts", "nan"), ("prefixes", "hangs"), ("blobs", "over_memory"), ("kills", "left_files")]
)
def test_a_count_that_must_be_0_is_seen(found, part, kind):
    found[part][kind] = 2
    assert wrong(found) == [f"{part}: {kind} 2"]


def test_a_fit_that_came_to_other_bytes_is_seen(found):
    found["kills"]["resumed_to_same_bytes"] -= 1
    assert wrong(found) == ["kills: other bytes"]
