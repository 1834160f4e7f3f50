"""The table of docs/results/smollm2 is what its script makes of the committed run."""

import json

from benchmarks.smollm2_summary import PAGE, RUN, page


def test_the_table_is_that_of_the_run():
    text = PAGE.read_text()
    assert page(text, json.loads(RUN.read_text())) == text
