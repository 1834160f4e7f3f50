"""Runs the evaluation's task `distortion` for a method on a toy model."""

from functools import cache

from cases import BY_NAME, Case, calibrated_artifact
from toy_language_model import toy_model, toy_tokenizer

from calib.evaluate.tasks import Subject
from calib.evaluate.tasks.distortion import Distortion
from calib.runtime import compress

CASES = BY_NAME | {
    "zipcache-half": Case("zipcache-half", "zipcache", 0, {"ratio": 0.5, "value_scale": "tier"}),
    "mikv-half": Case("mikv-half", "mikv", 0, {"ratio": 0.5, "retained": 2}),
}

LENGTH = 128  # whole pages of 128 and of 64
SEQUENCES = 3


@cache
def model():
    return toy_model()


@cache
def artifact():
    return calibrated_artifact(model())


def column_of(own, length=LENGTH, batch_size=2, limit=None, **options):
    subject = Subject(own, toy_tokenizer(), seed=7, batch_size=batch_size, limit=limit)
    (column,) = Distortion(length=length, sequences=SEQUENCES, **options).columns(subject)
    return column


@cache
def column():
    return column_of(model())


def opened(name, own=None):
    case = CASES[name]
    return compress(own or model(), case.method, artifact() if case.artifact else None, **case.options)


def figures(name, own=None, column=column):
    parts, of = [], column()
    for batch in of.batches():
        with opened(name, own) as opened_cache:
            parts.append(of.measure(opened_cache, batch))
    return of.summary(parts)
