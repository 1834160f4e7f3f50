"""Helpers for tests of the evaluation's tasks: a toy model as their subject, and a column's figures for a method."""

from toy_language_model import toy_tokenizer

from calib.evaluate.tasks import Subject
from calib.runtime import compress


def subject(model, batch_size=4, limit=None, seed=7):
    return Subject(model, toy_tokenizer(), seed, batch_size, limit)


def figures(column, model, method, **options):
    """The figures of `method` in `column`; each batch has a cache of its own."""
    parts = []
    for part in column.batches():
        with compress(model, method, **options) as cache:
            parts.append(column.measure(cache, part))
    return column.summary(parts)
