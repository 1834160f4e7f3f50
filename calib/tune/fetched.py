"""How many exact pairs a step fetches from the host (SpeCache's k, arXiv:2503.16163), and what they take of a budget.

An exact pair stands in for a low-bit one, so that more of them are never worse, and attention is so sparse that few suffice: k
comes first. It is what the link brings while a step computes, so that nobody waits for it, or less where a budget would leave no
room for the cheapest low-bit copy. The copy gets what is left of the budget.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calib.errors import UsageError
from calib.runtime.methods import Geometry, method_class
from calib.runtime.methods.tuned import MOST_NUMBER
from calib.tune.allocation import TINY

POSITION_BYTES = 4  # of a pair on the device: which token it is


@dataclass(frozen=True)
class Link:
    """Between the host and the device, as a decode step meets it.

    Attributes:
        bandwidth: 10^9 bytes a second, or None.
        step_ms: milliseconds that a step takes, or None.
        rows: sequences of a batch, which share the link.
        context: tokens of a sequence over which its pairs are counted; None is the model's longest.
    """

    bandwidth: float | None = None
    step_ms: float | None = None
    rows: int = 1
    context: int | None = None


@dataclass(frozen=True)
class FetchedPairs:
    """What is chosen.

    Attributes:
        option: the method's, which says k.
        k: pairs of each layer and KV head.
        bits: that they take on the device, per value of a sequence of `context` tokens.
        context: tokens.
        step_bytes: that come over the link in a step, of all rows, where every pair is a new one.
    """

    option: str
    k: int
    bits: float
    context: int
    step_bytes: int


def check_link(method: str, options: Mapping[str, Any], link: Link) -> None:
    """UsageError for a link where nothing is fetched, none where something is, or one that is none."""
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
    """The pairs of a step.

    Args:
        option: the method's.
        given: k where the user says it: it is not chosen.
        link: checked.
        context: tokens of a sequence.
        layers: that fetch.
        geometry: of the model.
        itemsize: bytes of a number of its keys and values.
        left: bits per value that they may take: the budget without the cheapest low-bit copy.
    """
    pair = 2 * geometry.head_dim * itemsize  # a key and a value
    heads = layers * geometry.kv_heads
    bits = 8 * (pair + POSITION_BYTES) / (2 * geometry.head_dim * context)  # of one, per value of the context
    if given is None:
        assert link.bandwidth is not None and link.step_ms is not None
        arriving = link.bandwidth * link.step_ms * 1e6 / (link.rows * heads * pair)
        k = max(0, math.floor(min(arriving, left / bits, context, MOST_NUMBER) + TINY))
    else:
        k = given
    held = min(k, context)  # a sequence has no more pairs than tokens
    return FetchedPairs(option, k, held * bits, context, link.rows * heads * held * pair)
