"""Errors of the keys and values in a method's pages, layer by layer, compared with the rate-distortion bound at the same bit rate.

A text goes through the cache in one forward; then the pages are decoded and compared with the exact keys and values. The rate of a
stream (keys or values) counts all that its pages hold: codes, parameters, corrections, the row's own tables, half the positions.
Tokens that are still exact in a window count neither for errors nor for rates. Bounds are those of Gaussian vectors with the text's
own covariance and a known mean (`calib/evaluate/rate_distortion.py`).

For a method that evicts tokens, only the share of kept tokens is reported, no distance. An exact method has no distance either.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from calib.capture.capture import stream
from calib.capture.sample import LayerSample
from calib.errors import RunError
from calib.evaluate.feed import Feed
from calib.evaluate.layer_distortion import ERRORS, LayerSums, distances, layer_sums
from calib.evaluate.stored import STREAMS, kept, knows_positions, on_device, page_bits, stored
from calib.evaluate.tasks.contract import Column, Subject, check_title, whole_number
from calib.evaluate.tasks.text import Text, TextSequences, text_source
from calib.runtime.cache import CompressedCache
from calib.runtime.layer import CompressedLayer
from calib.runtime.tiered.plan import TieredPlan

Sums = Mapping[int, LayerSums]


@dataclass(frozen=True)
class Distortion:
    """A task with one column.

    Args:
        text: a UTF-8 file, a list of them, a data set of the hub as {name:, config:, split:, column:}, or None: text
            sampled from the model itself at temperature 1, which needs no network.
        natural_spacing: turn WikiText's tokenised spacing (` @-@ `, ` ,`) back into written English.
        length: tokens in a sequence, all in one forward; tokens of an incomplete block stay exact and are not measured.
        sequences: number of sequences. Together they should have many times as many tokens as a head has channels.
        title: the column's title.
    """

    text: Text = None
    natural_spacing: bool = False
    length: int = 256
    sequences: int = 16
    title: str = "distance to the bound"

    def __post_init__(self) -> None:
        whole_number("distortion", "length", self.length, 2)
        whole_number("distortion", "sequences", self.sequences, 1)
        check_title("distortion", self.title)
        text_source("distortion", self.text, self.natural_spacing)

    def titles(self) -> list[str]:
        """Returns the title of its only column."""
        return [self.title]

    def columns(self, subject: Subject) -> list[Column]:
        """Reads the text; raises UsageError for sequences beyond the model's positions, or text too short for one sequence."""
        return [DistortionColumn(self, subject)]


class DistortionColumn:
    """Sequences of one text. A batch's part is its sums by layer, so that no tokens have to be kept."""

    measure_name = "dB above the bound"
    reads_pages = True
    passes = 2  # one forward with the cache, and one that captures the layers' exact queries, keys and values

    def __init__(self, task: Distortion, subject: Subject) -> None:
        self.title, self.subject = task.title, subject
        source = text_source("distortion", task.text, task.natural_spacing)
        self.sequences = TextSequences("distortion", source, subject, task.length, task.sequences)
        self.rows = self.sequences.count
        numbers = {"length": task.length, "sequences": self.rows}
        self.settings: dict[str, Any] = {"task": "distortion", **self.sequences.origin, **numbers}
        self.prompt = self.length = float(task.length)

    def batches(self) -> list[Tensor]:
        """Returns the sequences as tensors [at most batch_size, length]."""
        return self.sequences.batches()

    def measure(self, cache: CompressedCache, batch: Tensor) -> Sums:
        """Returns the sums of each compressed layer. Raises RunError if a sliding window is shorter than the sequences."""
        if cache.sequences.sliding is not None and cache.sequences.sliding < batch.shape[1]:
            raise RunError(
                f"every layer of this model has a sliding window of {cache.sequences.sliding} tokens, got sequences "
                f"of {batch.shape[1]}; give a smaller 'tasks.distortion.length'"
            )
        model, found = self.subject.model, {}
        with listening(cache) as given:
            Feed(model, cache)(batch, only_last=True)
        read = told_positions(cache)
        if read is not cache:
            with read, listening(read) as given:
                Feed(model, read)(batch, only_last=True)

        def take_in(sample: LayerSample) -> None:
            layers = [of.layers[sample.layer] for of in (cache, read)]
            if isinstance(layers[0], CompressedLayer):
                keys, values = given[sample.layer]
                found[sample.layer] = sums_of(replace(sample, keys=keys, values=values), *layers)

        everything = torch.ones_like(batch, dtype=torch.bool)
        stream(model, batch, everything, torch.arange(batch.numel()).view(batch.shape), take_in)
        return found

    def summary(self, parts: Sequence[Sums]) -> dict[str, float | int]:
        """Returns the figures of the cell.

        By layer and kind of error: error, bound and distance in dB, and the distance in bits per value (excess); by layer and
        stream: the pages' rate in bits per value. Of distance and excess also means over the layers, `distance` being the mean
        for keys and values; and the shares of tokens that are kept and encoded.
        """
        layers = parts[0]
        for part in parts[1:]:
            layers = {layer: sums + part[layer] for layer, sums in layers.items()}
        figures: dict[str, float | int] = {}
        by_kind: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ERRORS}
        for layer, sums in layers.items():
            for role in STREAMS:
                of_stream = getattr(sums, role)
                if of_stream.encoded:
                    figures[f"{role} bits layer {layer}"] = of_stream.rate
            for kind, found in distances(sums):
                by_kind[kind].append((found.distance, found.excess))
                for name in ("error", "bound", "distance", "excess"):
                    figures[f"{kind} {name} layer {layer}"] = getattr(found, name)
        for kind, pairs in by_kind.items():
            if pairs:
                figures[f"{kind} distance"], figures[f"{kind} excess"] = map(mean, zip(*pairs, strict=True))
        both = [figures[f"{role} distance"] for role in STREAMS if f"{role} distance" in figures]
        return {
            **({"distance": mean(both)} if both else {}),
            **figures,
            "kept": mean([sums.kept / sums.rows for sums in layers.values()]),
            "encoded": mean([getattr(s, role).encoded / s.keys.tokens for s in layers.values() for role in STREAMS]),
            "sequences": next(iter(layers.values())).rows,
            "tokens": next(iter(layers.values())).keys.tokens,
        }

    def words(self, figures: dict[str, float | int]) -> str:
        """Returns "5.41 dB: keys 6.02 (1.00 bits), logits 5.03 (0.84 bits), values 4.80 (0.80 bits)", or why there is none."""
        if "distance" not in figures:
            return self.brief(figures)
        parts = [
            f"{kind} {figures[f'{kind} distance']:.2f} ({figures[f'{kind} excess']:.2f} bits)"
            for kind in ERRORS
            if f"{kind} distance" in figures
        ]
        return f"{figures['distance']:.2f} dB: {', '.join(parts)}"

    def brief(self, figures: dict[str, float | int]) -> str:
        """Returns "5.41"; or "exact", "nothing encoded", "20.0% kept"."""
        if "distance" in figures:
            return f"{figures['distance']:.2f}"
        if figures["kept"] < 1:
            return f"{figures['kept']:.1%} kept"
        return "exact" if figures["encoded"] else "nothing encoded"


@contextmanager
def listening(cache: CompressedCache) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Context manager: the yielded mapping has the keys and values given to `cache.update`, by layer.

    They are recorded from the same forward, since another one would round some of them differently.
    """
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given[layer] = (keys, values)
        return CompressedCache.update(cache, keys, values, layer, *args, **kwargs)

    cache.update = update  # type: ignore[assignment]
    try:
        yield given
    finally:
        del cache.update


def told_positions(cache: CompressedCache) -> CompressedCache:
    """Returns the cache, or, if its tiers do not record the positions of their tokens, an empty copy whose tiers do.

    The cache of a method that evicts is returned as it is, since its errors are not measured.
    """
    stores = [on_device(layer.store) for layer in cache.compressed if layer.store is not None]
    if all(knows_positions(store) or kept(store, 0) < 1 for store in stores):
        return cache
    told = copy.deepcopy(cache)
    told.reset()
    for layer in told.compressed:
        assert isinstance(layer.plan, TieredPlan)  # an offloading plan records positions anyway
        layer.plan = replace(layer.plan, positions=True)
    return told


def sums_of(sample: LayerSample, layer: CompressedLayer, told: CompressedLayer) -> LayerSums:
    """Returns the sums of one layer: sizes from `layer`, decoded tokens and their positions from `told`."""
    assert layer.store is not None and told.store is not None
    own, read, rows = on_device(layer.store), on_device(told.store), range(len(sample.keys))
    shares = [kept(own, row) for row in rows]
    if min(shares) < 1:
        return layer_sums(sample, [], dict.fromkeys(STREAMS, 0.0), sum(shares))
    each = [page_bits(own, row) for row in rows]
    bits = {role: sum(row[role] for row in each) for role in STREAMS}
    return layer_sums(sample, [stored(read, row) for row in rows], bits, sum(shares))


def mean(numbers: Sequence[float]) -> float:
    """Returns the mean of at least one number."""
    return sum(numbers) / len(numbers)
