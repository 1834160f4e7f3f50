"""The tables of docs/results/smollm2 are what their script makes of the committed runs."""

from benchmarks.smollm2_summary import PAGE, page


def test_the_tables_are_those_of_the_runs():
    text = PAGE.read_text()
    assert page(text) == text
