"""Saves a tiered store's content for a file, and restores it."""

from typing import TYPE_CHECKING

from torch import Tensor

from calib.runtime.files.state import State, StateError, branch, tensor_like, whole
from calib.runtime.messages.printable import printable
from calib.runtime.stages.codec.corrected import OUTLIERS
from calib.runtime.tiered.tier import POSITIONS, part_named

if TYPE_CHECKING:
    from calib.runtime.tiered.store import TieredStore


def state_of(store: "TieredStore") -> State:
    """The state of the tiers, of the windows, and of the rows' own parameters."""
    return {
        "tiers": {str(number): tier.state() for number, tier in enumerate(store.tiers)},
        "transforms": {str(number): part.state() for number, part in enumerate(store.transforms.values())},
        "dictionaries": {role: dictionary.state() for role, dictionary in store.dictionaries.items()},
        "windows": {
            str(number): window.state(store.window_slots()) for number, window in enumerate(store.windows or ())
        },
        "query_values": store.query_values,
        "of_rows": {name: getattr(store, name) for name in store.of_rows},
    }


def restore(store: "TieredStore", state: State) -> None:
    """Fills an empty store from `state`, as `state_of` returned it; the sequence state is restored already. Raises StateError."""
    store.query_values = whole(state, "query_values")
    store.fit_rows()
    row_params = 0 if store.sequences.row_params is None else store.sequences.row_params.capacity
    for number, tier in enumerate(store.tiers):
        own = branch(branch(state, "tiers"), str(number))
        tier.restore(own, store.sequences.tables[number].capacity, row_params)
        if tier.pool.device.type != "meta":
            _check_positions(store, number, branch(own, "pages"))
            _check_row_params(store, number)
    for number, transform in enumerate(store.transforms.values()):
        transform.restore(branch(branch(state, "transforms"), str(number)))
    for number, window in enumerate(store.windows or ()):
        window.restore(branch(branch(state, "windows"), str(number)), store.window_slots())
    for role, dictionary in store.dictionaries.items():
        dictionary.restore(branch(branch(state, "dictionaries"), role))
    for name in store.of_rows:
        setattr(store, name, tensor_like(branch(state, "of_rows"), name, getattr(store, name)))


def _check_positions(store: "TieredStore", number: int, pages: State) -> None:
    """Raises StateError if a token of a tier has a position that its row has not reached: keys are rotated, and fetched pairs
    matched, by it. Slots that are not in use are not checked, because they are never read."""
    if POSITIONS not in store.tiers[number].pool.fields:
        return
    sequences = store.sequences
    for row, (own, length) in enumerate(zip(sequences.tables[number].rows, sequences.lengths, strict=True)):
        used = sequences.held(row, length)[number]
        found: Tensor = pages[POSITIONS][own].transpose(0, 1).flatten(1)[:, :used]
        _check(found, sequences.sinks + sequences.encoded(row, length), f"positions in tier {number} of row {row}")


def _check_row_params(store: "TieredStore", number: int) -> None:
    """Raises StateError if a row's segment lists an outlier of a token that the row does not have in the tier."""
    table, tier = store.sequences.row_params, store.tiers[number]
    if table is None or tier.row_params is None:
        return
    for row, (own, length) in enumerate(zip(table.rows, store.sequences.lengths, strict=True)):
        used = max(1, store.sequences.held(row, length)[number])
        for role, stages in tier.plan.streams():
            found = stages.codec.corrections
            if found is None or found.outliers is None or not own:
                continue
            name = f"{role}.{OUTLIERS}".removesuffix(".")
            fields = part_named(tier.row_params.tensors, name)
            wrong = found.outliers.wrong({key: part[own] for key, part in fields.items()}, tier.coded[role], used)
            if wrong is not None:
                raise StateError(f"{name!r} of row {row} {wrong}")


def _check(found: Tensor, below: int, what: str) -> None:
    if found.numel():
        least, most = (int(end) for end in found.aminmax())
        if least < 0 or most >= below:
            raise StateError(f"{what} range from {printable(least)} to {printable(most)}, expected 0 ... {below - 1}")
