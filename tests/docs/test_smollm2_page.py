"""The tables of docs/results/smollm2 are those that `benchmarks/smollm2_summary.py` makes from the committed runs."""

from benchmarks.smollm2_summary import PAGE, page


def test_the_tables_are_those_of_the_runs():
    text = PAGE.read_text()
    assert page(text) == text
