"""Writes the cases of the columns as JSON, for another program that answers them (`calib/evaluate/entries/results.py`).

    {"format": 1, "model": ..., "weights": ..., "dtype": ..., "columns": [{"title", "settings", "kind", "batches", ...}]}

`kind` is `answers` (prompts, mask, answers, asked: as in `tasks/answer_tokens.py`) or `text` (tokens, with `prefill` and
`chunk`: as in `tasks/perplexity.py`). Other tasks need more than another library's cache gives, and are not written.
"""

import json
from typing import Any

from calib.errors import UsageError
from calib.evaluate.evaluation import Evaluation
from calib.evaluate.tasks import Written

FORMAT = 1


def cases(evaluation: Evaluation) -> str:
    """Returns the text of the file; raises UsageError if no column can be written."""
    written = [column for column in evaluation.columns if isinstance(column, Written)]
    if not written:
        titles = ", ".join(f"'{column.title}'" for column in evaluation.columns)
        raise UsageError(
            f"--write-cases writes cases of retrieval, needle and perplexity, but this run has only {titles}; add such a task"
        )
    content: dict[str, Any] = {
        "format": FORMAT,
        "model": evaluation.request.model,
        "weights": evaluation.given.identity["weights"],
        "dtype": evaluation.base["dtype"],
        "columns": [{"title": column.title, "settings": column.settings, **column.cases()} for column in written],
    }
    return json.dumps(content, allow_nan=False) + "\n"
