"""Layers of a model on two simulated GPUs: no operation of any method has tensors of both."""

import pytest
import torch
from cases import BY_NAME, CASES, Case
from layer_walk import Tokens
from simulated_devices import SimulatedDevices, on
from toy_models import random_model

from calib.runtime.cache import CompressedCache
from calib.runtime.logits import Logits

DEVICES = ("meta:0", "meta:1")


def feed(cache: CompressedCache, rows: list[Tokens]) -> None:
    """One forward: row i adds `rows[i]`, left-padded with zeros, layer l on the device l of `DEVICES`."""
    columns, seen = max(map(len, rows)), cache.get_seq_length()
    held = cache.sequences.lengths or [0] * len(rows)
    mask = torch.zeros(len(rows), seen + columns, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        mask[row, seen - held[row] : seen] = True
        mask[row, seen + columns - len(tokens) :] = True
    for number, layer in enumerate(cache.compressed):
        parts = [[getattr(tokens, part)[number] for tokens in rows] for part in ("queries", "keys", "values")]
        query, keys, values = (
            on(
                DEVICES[number],
                torch.stack([torch.nn.functional.pad(x, (0, 0, columns - x.shape[1], 0)) for x in part]),
            )
            for part in parts
        )
        with SimulatedDevices():
            layer.update(keys, values)
            layer.attend(query, None if mask.all() else mask, Logits(query.shape[-1] ** -0.5))


def walk(case: Case, lengths: tuple[int, int]) -> None:
    """Feeds prompts of these lengths, decode steps, and several tokens at once."""
    model = random_model("llama")
    tokens = [Tokens.random(model, 330, seed=seed) for seed in (330, 290)]
    cache = case.open(model)
    cache.release()
    feed(cache, [own[:length] for own, length in zip(tokens, lengths, strict=True)])
    for start, stop in ((0, 1), (1, 2), (2, 50), (50, 51), (51, 52)):
        feed(cache, [own[length + start : length + stop] for own, length in zip(tokens, lengths, strict=True)])


@pytest.mark.full
@pytest.mark.parametrize("lengths", [(200, 200), (200, 160)], ids=["rows of one length", "rows of two"])
def test_what_all_layers_share_is_there_on_each_device(lengths):
    """With every kind of store."""
    for name in ("full", "kivi-2-short", "zipcache-short", "h2o", "specache", "infllm", "csr-short"):
        walk(BY_NAME[name], lengths)


@pytest.mark.full
@pytest.mark.parametrize("lengths", [(200, 200), (200, 160)], ids=["rows of one length", "rows of two"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_every_case(case: Case, lengths):
    walk(case, lengths)
