"""All combinations of a method's option grid that a model and an artifact allow."""

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
    """One combination of options.

    Attributes:
        shared: index of its combination of options that are the same in every layer.
        options: the options that are the same in every layer, including those that the user gave.
        own: the options that may differ by layer.
        plans: the plan of each compressed layer; for a method with exact tokens on the host, the plan of its device part.
    """

    shared: int
    options: Options
    own: Options
    plans: Mapping[int, Plan]


def grid_of(method: str, given: Mapping[str, Any]) -> Grid:
    """Returns the method's grid without the `given` options; raises UsageError if nothing is left to choose."""
    found: Grid | None = getattr(method_class(method), "grid", None)
    if method == "klt":
        raise UsageError("method 'klt' needs no tuning: its option bits is a budget already, such as bits=2.5")
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
    """Returns the combinations that are valid in all `layers`; raises UsageError with the last reason if there are none.

    `complete` adds to the plans what they need from the model and its tokenizer.
    """
    grid, found, reason = grid_of(method, given), [], ""
    for number, shared in enumerate(grid.globals()):
        for own in grid.layers():
            try:
                built = build(method, {**given, **shared, **own})
                whole = complete({layer: built.plan(layer, geometry, artifact) for layer in layers})
                plans = {layer: on_device(plan) for layer, plan in whole.items()}
                for plan in plans.values():
                    plan.check(geometry.head_dim, dtype)
            except ValueError as error:  # such as a group wider than a head
                reason = str(error)
                continue
            found.append(Candidate(number, {**given, **shared}, own, plans))
    if not found:
        raise UsageError(f"no combination of the options of '{method}' is possible here: {reason}")
    return found


def on_device(plan: Plan) -> Plan:
    """Returns the part of the plan that encodes; tokens on the host are exact."""
    return plan.low if isinstance(plan, OffloadPlan) else plan
