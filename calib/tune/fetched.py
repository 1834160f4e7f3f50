"""Chooses how many exact pairs a decode step fetches from the host (SpeCache's k, arXiv:2503.16163), and counts their bits.

An exact pair replaces a low-bit one, so that more pairs never hurt, and attention is so sparse that few suffice. So k is chosen
first: as many pairs as the link transfers while a step computes, so that the step does not wait for them, but no more than leave
room in the budget for the cheapest low-bit copy. That copy gets the rest of the budget.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.errors import UsageError
from calib.runtime.methods import Geometry, method_class
from calib.runtime.methods.tuned import MOST_NUMBER
from calib.tune.allocation import TINY

POSITION_BYTES = 4  # bytes of a fetched pair's position on the device


@dataclass(frozen=True)
class Link:
    """The link between host and device during a decode step.

    Attributes:
        bandwidth: bandwidth in 10^9 bytes per second, or None.
        step_ms: milliseconds of a decode step, or None.
        rows: rows of a batch, which share the link.
        context: tokens of a sequence, over which the bits of its fetched pairs are averaged; None: the model's longest.
    """

    bandwidth: float | None = None
    step_ms: float | None = None
    rows: int = 1
    context: int | None = None


@dataclass(frozen=True)
class FetchedPairs:
    """The chosen number of fetched pairs.

    Attributes:
        option: name of the method's option for k.
        k: fetched pairs of each layer and KV head.
        bits: their bits on the device, per value of a sequence of `context` tokens.
        context: tokens of the sequence.
        step_bytes: most bytes that a step transfers, for all rows: no pair is on the device already.
    """

    option: str
    k: int
    bits: float
    context: int
    step_bytes: int


def check_link(method: str, options: Mapping[str, Any], link: Link) -> None:
    """Raises UsageError if link options are given for a method that fetches nothing, or are missing, invalid or superfluous."""
    option, given = method_class(method).grid.fetched, link.bandwidth is not None or link.step_ms is not None
    if option is None:
        if given or link.rows != 1 or link.context is not None:
            raise UsageError(
                f"--bandwidth, --step_ms, --rows and --context are for methods that fetch from the host, and '{method}' does not; "
                "leave them out"
            )
        return
    if option in options and given:
        raise UsageError(
            f"--{option} is given, and --bandwidth and --step_ms would choose it; leave one or the other out"
        )
    if option in options:
        return
    for name, unit in (("bandwidth", "GB/s, such as 20"), ("step_ms", "milliseconds, such as 30")):
        value = getattr(link, name)
        if value is None:
            raise UsageError(
                f"method '{method}' fetches {option} exact pairs for each step: give --bandwidth and --step_ms, from which "
                f"{option} follows, or --{option}"
            )
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} {value:g} must be above 0, in {unit}")


def fetched_within(
    option: str,
    given: int | None,
    link: Link,
    context: int,
    layers: int,
    geometry: Geometry,
    itemsize: int,
    left: float,
) -> FetchedPairs:
    """Returns the pairs that a step fetches.

    Args:
        option: name of the method's option for k.
        given: k if the user gave it; then it is not chosen.
        link: the checked link.
        context: tokens of a sequence.
        layers: number of layers that fetch.
        geometry: the model's shape.
        itemsize: bytes of an element of its keys and values.
        left: most bits per value of the fetched pairs: the budget minus the cheapest low-bit copy.
    """
    pair = 2 * geometry.head_dim * itemsize  # a key and a value
    heads = layers * geometry.kv_heads
    bits = 8 * (pair + POSITION_BYTES) / (2 * geometry.head_dim * context)  # bits of one pair per value of the context
    if given is None:
        assert link.bandwidth is not None and link.step_ms is not None
        arriving = link.bandwidth * link.step_ms * 1e6 / (link.rows * heads * pair)
        k = max(0, math.floor(min(arriving, left / bits, context, MOST_NUMBER) + TINY))
    else:
        k = given
    held = min(k, context)  # a sequence has no more pairs than tokens
    return FetchedPairs(option, k, held * bits, context, link.rows * heads * held * pair)
