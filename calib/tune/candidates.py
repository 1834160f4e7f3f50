"""Every combination of a method's grid that a model and an artifact allow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calib.errors import UsageError
from calib.runtime import Artifact
from calib.runtime.methods import METHODS, Geometry, build, method_class
from calib.runtime.methods.grid import Grid, Options
from calib.runtime.offload.plan import OffloadPlan
from calib.runtime.store import Plan


@dataclass(frozen=True)
class Candidate:
    """One combination.

    Attributes:
        shared: number of its combination of the options that are the same in every layer.
        options: those that are the same in every layer, given ones included.
        own: those that may differ by layer.
        plans: the stages of each compressed layer; of a method that keeps exact tokens on the host those on the device.
    """

    shared: int
    options: Options
    own: Options
    plans: Mapping[int, Plan]


def grid_of(method: str, given: Mapping[str, Any]) -> Grid:
    """What a budget chooses of a method where some options are given; UsageError where nothing is left to choose."""
    found: Grid | None = getattr(method_class(method), "grid", None)
    if found is None:
        known = ", ".join(name for name, chosen in METHODS.items() if hasattr(chosen, "grid"))
        raise UsageError(f"method '{method}' has no option that a budget could choose; one of {known}")
    left = found.without(given)
    if not left.by_layer and not left.shared and left.fetched is None:
        raise UsageError(
            f"every option of '{method}' that a budget could choose is given ({', '.join(given)}); leave one out"
        )
    return left


def candidates(
    method: str,
    given: Mapping[str, Any],
    layers: Sequence[int],
    geometry: Geometry,
    artifact: Artifact,
    dtype: torch.dtype,
    complete: Callable[[dict[int, Plan]], dict[int, Plan]] = lambda plans: plans,
) -> list[Candidate]:
    """Those that the method takes in all of `layers`; raises UsageError with the last reason where it takes none. `complete` adds
    what plans must know of the model and its tokenizer."""
    grid, found, reason = grid_of(method, given), [], ""
    for number, shared in enumerate(grid.globals()):
        for own in grid.layers():
            try:
                built = build(method, {**given, **shared, **own})
                whole = complete({layer: built.plan(layer, geometry, artifact) for layer in layers})
                plans = {layer: on_device(plan) for layer, plan in whole.items()}
                for plan in plans.values():
                    plan.check(geometry.head_dim, dtype)
            except (
                ValueError
            ) as error:  # such as more bits for the others than for the important, a group wider than a head
                reason = str(error)
                continue
            found.append(Candidate(number, {**given, **shared}, own, plans))
    if not found:
        raise UsageError(f"no combination of the options of '{method}' is possible here: {reason}")
    return found


def on_device(plan: Plan) -> Plan:
    """The part that encodes: what lies on the host is exact."""
    return plan.low if isinstance(plan, OffloadPlan) else plan
