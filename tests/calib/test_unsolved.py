"""A column that the full cache does not solve is marked: it says nothing about the methods."""

import pytest
from toy_run import toy_run

from calib.evaluate.compare import compared
from calib.evaluate.page.page import page
from calib.evaluate.run_file import check
from calib.evaluate.unsolved import unsolved


def run(exact, low, high, chance=None, method="full"):
    """The toy run with these answers of its full row."""
    content = toy_run()
    content["cells"][0]["figures"] |= {"exact": exact, "low": low, "high": high}
    content["cells"][0]["method"] = method
    if chance is not None:
        content["columns"][0]["chance"] = chance
    check(content)
    return content


@pytest.mark.parametrize(
    ("figures", "chance", "reason"),
    [
        ((0.0, 0.0, 0.16), None, "full has 0.000 [0.000, 0.160] exact answers"),
        ((0.1, 0.03, 0.3), 0.05, "full has 0.100 [0.030, 0.300] exact answers, and guessing gives 0.050"),
        ((0.1, 0.03, 0.3), None, None),
        ((0.3, 0.15, 0.5), 0.05, None),
        ((0.1, 0.03, 0.3), "much", None),
    ],
)
def test_a_column_is_solved_where_the_interval_lies_above_guessing(figures, chance, reason):
    assert unsolved(run(*figures, chance)) == ({} if reason is None else {"needle 64": reason})


def test_only_a_full_row_tells():
    assert unsolved(run(0.0, 0.0, 0.16, method="rtn")) == {}
    assert set(unsolved(run(0.0, 0.0, 0.16, method="peer dynamic"))) == {"needle 64"}
    content = run(0.0, 0.0, 0.16)
    content["cells"][0] = {
        **{key: value for key, value in content["cells"][0].items() if key not in ("figures", "sizes")},
        "error": "MemoryError: no room",
    }
    assert unsolved(content) == {}


def test_the_page_marks_it():
    marked, solved = page(run(0.0, 0.0, 0.16), "calib eval"), page(run(1.0, 0.84, 1.0), "calib eval")
    assert "needle 64 †</th>" in marked and "† needle 64 does not distinguish the methods: full has 0.000" in marked
    assert "†" not in solved


def test_what_guessing_has_is_no_other_data():
    tables = compared(run(1.0, 0.84, 1.0, 0.05), run(1.0, 0.84, 1.0), "old.json")
    assert "other data" not in str(tables[0].rows)
