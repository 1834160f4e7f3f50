"""The pages about `klt` on other text than it was fitted on are what benchmarks/klt_mismatch.py writes from its results."""

import json

import pytest

from benchmarks.klt_mismatch import RESULTS, ROWS, TABLES, page

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize("compared", ROWS)
def test_a_page_is_its_results_under_a_title(compared):
    suffix = "" if compared == "rope" else f"_{compared}"
    found = json.loads((RESULTS / f"klt_mismatch{suffix}.json").read_text())["found"]
    written = (TABLES / f"mismatch{suffix}.md").read_text()
    assert written.startswith("# ") and written == page(compared, found)
