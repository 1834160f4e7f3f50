"""The new tokens of one layer in a forward are attended and stored: all at once, or chunk by chunk where the plan has an
`encoding_chunk`.

The store is prepared: the page table already names the pages that the forward fills.
"""

import copy

import torch
from torch import Tensor

from calib.runtime.attend.request import QKV, AttendRequest
from calib.runtime.logits import Logits
from calib.runtime.paging.encoding_chunks import encoding_chunks
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.paging.pages import TILE_TOKENS
from calib.runtime.paging.sequence_state import SequenceState
from calib.runtime.store import Plan, Store


def in_chunks(forward: Forward, chunk: int | None) -> bool:
    """Whether a row has more new tokens than one chunk, so that they are attended and stored chunk by chunk."""
    return chunk is not None and max(forward.counts) > chunk


def attended_and_stored(store: Store, plan: Plan, forward: Forward, given: QKV, logits: Logits) -> Tensor:
    """Attends and then stores new tokens; returns the output `[rows, heads, n, D]`."""
    chunk = plan.encoding_chunk
    if chunk is None or not in_chunks(forward, chunk):
        output = attended(store, forward, given, logits, observe=True)
        stored(store, forward, given.of_columns(slice(forward.width)) if forward.speculative else given)
        return output
    output = given.query.new_zeros(*given.query.shape[:3], given.values.shape[3])
    for part in encoding_chunks(forward, chunk):
        own = QKV(*map(part.of, given))
        part.put(attended(store, part.forward, own, logits, observe=True), output)
        stored(store, part.forward, own)
    return output


def attended_unstored(
    store: Store, sequences: SequenceState, plan: Plan, forward: Forward, given: QKV, logits: Logits
) -> Tensor:
    """Attends unconfirmed tokens, which stay unstored. If they are more than a chunk, a copy of the store takes them and is then
    dropped: later chunks attend to the encoded earlier ones, and it is not known yet which tokens will be kept."""
    if not in_chunks(forward, plan.encoding_chunk):
        return attended(store, forward, given, logits, observe=False)
    # The copy refers to a forward without the drafts that earlier layers have left in it.
    store, sequences = copy.deepcopy((store, sequences), {id(forward): forward.without(0)})
    accepted = sequences.accept(forward)
    store.prepare(accepted)
    output = attended_and_stored(store, plan, accepted, given, logits)
    store.state()  # waits for copies on a side stream, so that the copied store's memory is freed now
    return output


def attended(store: Store, forward: Forward, given: QKV, logits: Logits, observe: bool) -> Tensor:
    """Attends new tokens at once. Rows with padding in this forward are attended one by one, without it; others together, as many
    as fill a tile."""
    batch, step = given.query.shape[0], 1 if forward.columns is not None else TILE_TOKENS // PAGE_TOKENS
    if forward.columns is None and batch <= step:
        return store.attend(AttendRequest(forward, range(batch), logits, given, observe))
    outputs = []
    for at in range(0, batch, step):
        rows = range(at, min(at + step, batch))
        part = given.of_rows(rows)
        if forward.columns is None:
            outputs.append(store.attend(AttendRequest(forward, rows, logits, part, observe)))
            continue
        columns = forward.columns[at].to(given.query.device)
        output = part.query.new_zeros(*part.query.shape[:3], part.values.shape[3])
        if forward.counts[at]:
            part = part.of_columns(columns)
            output[:, :, columns] = store.attend(AttendRequest(forward, rows, logits, part, observe))
        outputs.append(output)
    return torch.cat(outputs)


def stored(store: Store, forward: Forward, given: QKV) -> None:
    """Stores new tokens, detached: outside torch.no_grad() a stored token would keep the graph of every forward alive."""
    keys, values = given.keys, given.values
    if keys.requires_grad or values.requires_grad:
        keys, values = keys.detach(), values.detach()
    store.store(forward, keys, values)
