"""The options that `calib tune` chose for a method, layer by layer: their record in the artifact's provenance, and the method built
from it.

    compress(model, "zipcache", artifact=artifact, tuned=2.5)

The record is `provenance["tuned"] = {"version": 1, "choices": [...]}`, each choice with the fields of `Choice`; the artifact's
checksum covers it, and everything of it is checked before any of it is used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from calib.runtime.artifact.artifact import Artifact, ArtifactError
from calib.runtime.messages.printable import printable, shortened
from calib.runtime.methods.paper_counting import CountedCache
from calib.runtime.store import Plan

KEY = "tuned"
VERSION = 1
MOST_BITS = 64  # the largest budget; an exact float32 value has 32
MOST_NUMBER = 2**17  # the largest whole number in an option (tokens of a window, atoms): it bounds loops over these
LONGEST = 200  # characters of a list or of a method's own message
REMEDY = "write it anew with `calib tune`"

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """The options that were chosen for one method and one budget.

    Attributes:
        method: the method's name.
        budget: the most true bits per value of the encoded tokens.
        options: options that are the same in every layer.
        layers: for each layer of the model its other options; None for a layer that is not compressed.
        predicted: `bits` and `loss` of the whole model, `layers` with both of each layer or None; and `uniform`, the best
            single setting within the budget (`options`, `bits`, `loss`), or None.
        measured_on: the text that was measured on, how much of it, and the seed.
    """

    method: str
    budget: float
    options: Options
    layers: Sequence[Options | None]
    predicted: Mapping[str, Any]
    measured_on: Mapping[str, Any]

    def of_layer(self, layer: int) -> dict[str, Any]:
        """Returns all options of a layer; raises ValueError if nothing was chosen for it."""
        own = self.layers[layer]
        if own is None:
            raise ValueError(f"the artifact has no tuned options for layer {layer}, which is compressed here; {REMEDY}")
        return {**self.options, **own}


def choices(artifact: Artifact) -> list[Choice]:
    """Returns the choices in the artifact, an empty list if none were tuned; raises `ArtifactError` for a malformed record."""
    record = artifact.provenance.get(KEY)
    if record is None:
        return []
    if not isinstance(record, dict) or record.get("version") != VERSION:
        found = record.get("version") if isinstance(record, dict) else record
        raise ArtifactError(f"provenance.{KEY} has version {printable(found)}, expected {VERSION}; {REMEDY}")
    if not isinstance(record.get("choices"), list):
        raise ArtifactError(f"provenance.{KEY} has no list of choices; {REMEDY}")
    return [_checked(entry, artifact.fingerprint["layers"]) for entry in record["choices"]]


def with_choices(artifact: Artifact, new: Sequence[Choice]) -> Artifact:
    """Returns the artifact with the choices `new` added; they replace earlier ones for the same method and budget."""
    found = {(choice.method, choice.budget): choice for choice in [*choices(artifact), *new]}
    record = {"version": VERSION, "choices": [asdict(found[key]) for key in sorted(found)]}
    return replace(artifact, provenance={**artifact.provenance, KEY: record})


@dataclass(frozen=True)
class Tuned:
    """A method with the options that `calib tune` chose for the budget `tuned`, in bits per value, as the artifact has them."""

    name: str
    method: type[Any]
    tuned: float

    def __post_init__(self) -> None:
        if type(self.tuned) not in (float, int) or not 0 < self.tuned < math.inf:
            raise ValueError(
                f"tuned must be a budget of `calib tune` in bits per value, such as 2.5, got {printable(self.tuned)}"
            )

    def plan(self, layer: int, geometry: Any, artifact: Artifact | None) -> Plan:
        """Returns the layer's plan, of the method with this layer's options; raises `ArtifactError` for options that it refuses."""
        options, known = self.choice(artifact).of_layer(layer), {field.name for field in fields(self.method)}
        if not known >= options.keys():
            unknown = shortened(", ".join(sorted(options.keys() - known)), LONGEST)
            raise ArtifactError(
                f"provenance.{KEY} gives '{self.name}' options that it does not have: {unknown}; {REMEDY}"
            )
        large = next((name for name, value in options.items() if not _is_moderate(value)), None)
        if large is not None:
            raise ArtifactError(
                f"provenance.{KEY} gives '{self.name}' {printable(large)}={printable(options[large])}, expected no whole number "
                f"beyond {MOST_NUMBER}; {REMEDY}"
            )
        try:
            plan: Plan = self.method(**options).plan(layer, geometry, artifact)
        except ArtifactError:
            raise
        except (ValueError, TypeError) as error:  # a file may have options of any type and value
            said = shortened(" ".join(str(error).split()), LONGEST)
            raise ArtifactError(
                f"provenance.{KEY} gives '{self.name}' options that it refuses: {said}; {REMEDY}"
            ) from error
        return plan

    def paper_bits(self, cache: CountedCache) -> None:
        """None: no paper has a formula for options that differ from layer to layer."""

    def choice(self, artifact: Artifact | None) -> Choice:
        """Returns the artifact's choice for exactly this method and budget; raises ValueError if there is none."""
        asked = f"method '{self.name}' with tuned={self.tuned:g}"
        if artifact is None:
            raise ValueError(
                f"{asked} needs the artifact that `calib tune` wrote: pass artifact=Artifact.load(...), or --artifact FILE"
            )
        there = choices(artifact)
        for choice in there:
            if choice.method == self.name and choice.budget == self.tuned:
                return choice
        known = ", ".join(f"{choice.method} at {choice.budget:g}" for choice in there[:LONGEST])
        known = shortened(known, LONGEST) or "none"
        raise ValueError(
            f"{asked}: this artifact has no choice of that budget (there are: {known}); take one of them, or "
            f"`calib tune --method {self.name} --bits {self.tuned:g}`"
        )


def _is_moderate(value: Any) -> bool:
    """Whether no whole number in an option's value is beyond `MOST_NUMBER`."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(_is_moderate, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, int) or abs(value) <= MOST_NUMBER


def check_one_sequence_state(plans: Mapping[int, Plan]) -> None:
    """Raises ValueError unless the plans of all layers (by layer) hold equal numbers of tokens in windows, tiers and pages."""
    (first, plan), *others = plans.items()
    for layer, other in others:
        if _sequence_state_of(other) != _sequence_state_of(plan):
            raise ValueError(
                f"the options of layers {first} and {layer} keep different numbers of tokens in windows and tiers, and all layers "
                f"must keep the same; {REMEDY}"
            )


def _sequence_state_of(plan: Plan) -> tuple[Any, ...]:
    sequences = plan.sequences(1, None)
    says = [getattr(sequences, name, None) for name in ("tiering", "keys", "values")]
    return type(sequences), says, [table.page_tokens for table in sequences.all_tables]


def _checked(entry: Any, layers: int) -> Choice:
    names = [field.name for field in fields(Choice)]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        found = printable(sorted(entry) if isinstance(entry, dict) else entry)
        raise ArtifactError(f"a choice in provenance.{KEY} has {found}, expected {sorted(names)}; {REMEDY}")
    choice = Choice(**entry)
    where = f"the choice of {printable(choice.method)} at {printable(choice.budget)} bits in provenance.{KEY}"
    good = {
        "method": isinstance(choice.method, str),
        "budget": type(choice.budget) in (float, int) and 0 < choice.budget <= MOST_BITS,
        "options": isinstance(choice.options, dict),
        "layers": isinstance(choice.layers, list)
        and len(choice.layers) == layers
        and all(own is None or isinstance(own, dict) for own in choice.layers),
        "predicted": isinstance(choice.predicted, dict),
        "measured_on": isinstance(choice.measured_on, dict),
    }
    for name, fits in good.items():
        if not fits:
            wanted = f", expected one entry for each of {layers} layers" if name == "layers" else ""
            raise ArtifactError(f"{where}: its field '{name}' is malformed{wanted}; {REMEDY}")
    return choice
