"""Checks of a cache after a forward, compared with the oracle of a row; each check yields a text for every difference."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import layer_walk
import torch
from oracle import held_tokens, rotated
from placement.layer import InfLLMRow, Row, Shown, pairs_of
from placement.reachable import tensors_of
from placement.scenarios import MAGIC
from tolerances import ATTENTION, FLOAT32_ATTENTION, STORED
from torch import Tensor

# Tolerance of outputs: sparse (CSR) tokens and rotated keys have one product more than others, so twice the rounding.
OUTPUT = ATTENTION | {torch.float32: 2 * FLOAT32_ATTENTION}

# Tolerance of keys that are rotated back to before RoPE and rounded to the model's dtype: half a unit of the largest value.
TURNED = {torch.float32: STORED, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def outputs(found: Tensor, expected: Tensor) -> Iterator[str]:
    """Outputs `[heads, n, D]` agree, to the tolerance of their dtype."""
    if expected.numel():
        error = (found.double() - expected).abs().amax((0, 2)) / expected.abs().max() / OUTPUT[found.dtype]
        if not bool((error <= 1).all()):
            bad = [column for column, own in enumerate(error) if not own <= 1]
            yield f"output off by {float(error.max()):.3g} tolerances in columns {bad} of {len(error)}"


def fetched_tokens(oracle: Row, shown: Shown) -> Iterator[str]:
    """The fetched tokens are those of the oracle, and their pairs are the row's keys and values, bit for bit.

    Keys that are held before RoPE may differ by their rounding, TURNED.
    """
    found, chosen = pairs_of(shown.positions), oracle.fetched_pairs()
    if found != chosen:
        yield f"fetched but not chosen: {sorted(found ^ chosen)}"
    for head in sorted({head for head, _ in found}):
        positions = shown.of(head)
        if int(positions.max()) >= oracle.length:
            yield f"head {head}: fetched {positions.tolist()} of {oracle.length} tokens"
            continue
        keys, values = shown.pairs[head][shown.positions[head] >= 0].split(
            [oracle.keys.shape[2], oracle.values.shape[2]], -1
        )
        own = oracle.keys[head, positions]
        if isinstance(oracle, InfLLMRow) and oracle.frequencies is not None:
            before = rotated(own, oracle.frequencies, -positions[:, None].double())
            same = bool(((keys - before).abs() <= TURNED[keys.dtype] * own.abs().max()).all())
        else:
            same = torch.equal(keys, own)
        if not same or not torch.equal(values, oracle.values[head, positions]):
            yield f"head {head}: pairs are not those of positions {positions.tolist()}"


def no_guess(cache: Any) -> Iterator[str]:
    """No tensor of a cache contains MAGIC, the value that marks speculative tokens."""
    for name, tensor in tensors_of(cache):
        if tensor.is_floating_point() and bool((tensor.abs().double() == MAGIC).any()):
            yield f"{name} holds a guess"


def on_host(host: Any, row: int, oracle: Row) -> Iterator[str]:
    """The host has the exact keys and values of every token that a sliding window has not dropped."""
    held, sliding = held_by(host, row), oracle.attending.sliding
    first = 0 if sliding is None else max(0, oracle.length - sliding + 1)
    for role, mine, theirs in (("keys", oracle.keys, held.keys), ("values", oracle.values, held.values)):
        if not torch.equal(mine[:, first:].double(), theirs[:, first:]):
            yield f"the host's {role} are not those that came"


def exact_window(low: Any, row: int, oracle: Row, counts: tuple[int, int]) -> Iterator[str]:
    """Of the tokens in the sliding window, KIVI's copy has the newest `counts` keys and values exactly, and no others."""
    held, sliding = held_by(low, row), oracle.attending.sliding
    first = 0 if sliding is None else max(0, oracle.length - sliding + 1)
    for role, count in zip(("keys", "values"), counts, strict=True):
        same = (getattr(oracle, role).double() == getattr(held, role)).all(-1).all(0)
        expected = torch.arange(oracle.length) >= oracle.length - count
        if not torch.equal(same[first:], expected[first:]):
            yield f"{int(same[first:].sum())} exact {role}, and not the newest {count} of {oracle.length}"


def low_bit(low: Any, twin: Any, row: int) -> Iterator[str]:
    """The low-bit copy stores the same bits as its method alone (`twin`); it may store positions in addition."""
    found, expected = (
        layer_walk.stored(SimpleNamespace(compressed=[SimpleNamespace(store=store)]), row) for store in (low, twin)
    )
    known = {name: part for name, part in found.items() if name in expected or not name.endswith(".positions")}
    if names := layer_walk.differing(known, expected):
        yield f"the low-bit copy is not its method's: {names}"


def local(low: Any, row: int, oracle: InfLLMRow) -> Iterator[str]:
    """Initial and local tokens are exact, and the attention m of local ones is the oracle's."""
    start, stop = min(oracle.blocks.initial, oracle.length), oracle.blocks.first_local(oracle.length)
    held = held_by(low, row)
    for role, mine, theirs in (("keys", oracle.keys, held.keys), ("values", oracle.values, held.values)):
        expected = torch.cat([mine[:, :start], mine[:, stop:]], 1).double()
        if expected.shape != theirs.shape or not torch.equal(expected, theirs):
            yield f"initial and local {role} are not those that came"
    expected = oracle.mass[:, stop:]
    found = low.mass[row, :, : expected.shape[1]].double()
    if found.shape != expected.shape:
        yield f"m of {found.shape[1]} local tokens, there are {expected.shape[1]}"
    elif expected.numel() and not bool((found - expected).abs().max() <= OUTPUT[torch.float32] * expected.max()):
        yield f"m is off by {float((found - expected).abs().max() / expected.max()):.3g}"


def held_by(store: Any, row: int) -> Any:
    """The decoded tokens of a row in a store without a layer."""
    return held_tokens(SimpleNamespace(store=store, state=store.sequences), row)
