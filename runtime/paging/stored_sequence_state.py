"""Restores lengths and pages from a file, after checking that they agree."""

from calib.runtime.files.state import State, StateError, branch, wholes
from calib.runtime.messages.printable import printable
from calib.runtime.paging.sequence_state import SequenceState


def restore(sequences: SequenceState, state: State, most: int) -> None:
    """Fills `sequences` with what `SequenceState.state` returned. It counts as one forward: layers continue with the second.

    No table may have more than `most` pages. Raises StateError where a row's pages do not fit its tokens.
    """
    sequences.clear()
    sequences.lengths, sequences.steps = wholes(state, "lengths"), 1
    sequences.restore_own(state)
    tables = branch(state, "tables")
    for number, table in enumerate(sequences.tables):
        table.restore_page_tokens(branch(tables, str(number)))
    needed = [
        (sequences.pages_of(row, length), sequences.first_page(length)) for row, length in enumerate(sequences.lengths)
    ]
    for number, table in enumerate(sequences.tables):
        table.restore(branch(tables, str(number)), [(counts[number], first) for counts, first in needed], most)
    if sequences.host_state is not None:
        restore(sequences.host_state, branch(state, "host"), most)
        if sequences.host_state.lengths != sequences.lengths:
            found, expected = printable(sequences.host_state.lengths), printable(sequences.lengths)
            raise StateError(f"rows of {found} tokens on the host, expected {expected}")
