"""Helpers for tests of the evaluation's tasks: a toy model as their subject, and a column's figures for a method."""

from contextlib import contextmanager
from itertools import product

import torch
from toy_language_model import toy_tokenizer

from calib.evaluate.tasks import Subject
from calib.runtime import compress


def subject(model, batch_size=4, limit=None, seed=7):
    return Subject(model, toy_tokenizer(), seed, batch_size, limit)


@contextmanager
def forwards(model):
    """Give a list that gets an entry for every forward of `model`: of a generation, one for each new token."""
    seen = []
    hook = model.register_forward_pre_hook(lambda *_: seen.append(None))
    try:
        yield seen
    finally:
        hook.remove()


@torch.no_grad()
def answered(model, batch, count, wrong=()):
    """The batch with the model's own predictions as the first `count` tokens of each answer; at `wrong` (row, position), others."""
    answers = batch.answers.clone()
    for row, position in product(range(len(answers)), range(count)):
        tokens = torch.cat((batch.prompts[row][batch.mask[row] > 0], answers[row, :position]))
        answers[row, position] = model(tokens[None]).logits[0, -1].argmax() + ((row, position) in wrong)
    return batch._replace(answers=answers)


def figures(column, model, method, **options):
    """The figures of `method` in `column`; each batch has a cache of its own."""
    parts = []
    for part in column.batches():
        with compress(model, method, **options) as cache:
            parts.append(column.measure(cache, part))
    return column.summary(parts)
