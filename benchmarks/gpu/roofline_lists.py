"""Predicts the time of the kernels of outlier lists in a decode step: a loop over tokens, with an inner loop over their outliers.

It imports these kernels, so it must be imported only after TRITON_INTERPRET is unset: interpreted kernels cannot be compiled.
"""

from collections.abc import Mapping
from math import comb
from typing import Any

from benchmarks.gpu.devices import DEVICES, Device
from benchmarks.gpu.loop_clocks import busy
from benchmarks.gpu.sizes import REAL
from calib.kernels.ahead_of_time import Specialisation, compiled
from calib.kernels.compiled_loop import code_and_loops, disassembled
from calib.kernels.occupancy import SCHEDULERS, programs_at_once
from calib.kernels.outliers.list_mixture_kernel import AT_ONCE as OF_MIXTURES
from calib.kernels.outliers.list_score_kernel import AT_ONCE as OF_SCORES
from calib.kernels.outliers.list_triton import PROGRAMS, SPECIALISATIONS, TOKENS
from calib.kernels.outliers.row_lists import LANES, LONGEST
from calib.kernels.turn_alone import turn_alone

SCORES, MIXTURES = "scores, lists of rows", "mixtures, lists of rows, rank 4"
# Outliers that a lane processes in one turn of the inner loop.
AT_ONCE = {SCORES: OF_SCORES.value, MIXTURES: OF_MIXTURES.value}


def list_loop(name: str, capability: int) -> dict[str, Any]:
    """Returns the figures of a compiled kernel's two loops: the outer one as `around`, the inner one as `inside`."""
    one: Specialisation = SPECIALISATIONS[name]
    kernel = compiled(one, capability)
    listing, used = disassembled(kernel)
    code, loops = code_and_loops(listing)
    (first, last), (begin, end) = sorted(loops, key=lambda ends: ends[0] - ends[1])[:2]
    parts = {"around": [*code[first:begin], *code[end + 1 : last + 1]], "inside": code[begin : end + 1]}
    return {
        "name": name,
        "capability": capability,
        "warps": one.warps,
        "registers": used["REG"],
        "programs": programs_at_once(used["REG"], kernel.metadata.shared, one.warps, capability),
        **{
            part: {"instructions": len(lines), "busy": busy(lines, capability), "alone": turn_alone(lines).clocks}
            for part, lines in parts.items()
        },
    }


def list_loops() -> list[dict[str, Any]]:
    """Returns the figures of both kernels, for every capability for which times are predicted."""
    capabilities = dict.fromkeys(own.capability for own in DEVICES.values())
    return [list_loop(name, capability) for name in (SCORES, MIXTURES) for capability in capabilities]


def turns_of_tile(share: float) -> float:
    """Returns the mean number of turns of the scores' inner loop for a tile, which its token with the most outliers decides.

    Each channel of a token has an outlier with probability `share`.
    """
    channels = REAL.head_dim
    at_most, turns, below = 0.0, 0.0, 0
    for count in range(channels + 1):
        at_most += comb(channels, count) * share**count * (1 - share) ** (channels - count)
        if count == below:
            turns += 1 - at_most**TOKENS
            below += AT_ONCE[SCORES]
    return turns


def turns_of_stretch(share: float) -> float:
    """Returns the mean number of turns of the mixtures' inner loop for a stretch; the last turn is half full on average."""
    return LONGEST * share * REAL.head_dim / (LANES * AT_ONCE[MIXTURES]) + 0.5


def listed(
    loop: Mapping[str, Any], share: float, splits: int, device: Device, heads: int, query_rows: int
) -> dict[str, Any]:
    """Returns the seconds of a launch by each limit, as `roofline.attended` does; `splits` are attention's parts of a head."""
    scores, tokens = loop["name"] == SCORES, REAL.tokens
    if scores:
        tiles = tokens // TOKENS
        turns = -(-tiles // max(1, PROGRAMS * device.multiprocessors // heads))
        splits, inner = -(-tiles // turns), turns_of_tile(share)
    else:
        turns, inner = -(-tokens // splits // (LONGEST * loop["warps"])), turns_of_stretch(share)
    programs = -(-heads * splits // device.multiprocessors)
    at_once = min(programs, loop["programs"])
    clocks = {
        pipe: loop["around"]["busy"].get(pipe, 0) + inner * loop["inside"]["busy"].get(pipe, 0)
        for pipe in {**loop["around"]["busy"], **loop["inside"]["busy"]}
    }
    pipe, most = max(clocks.items(), key=lambda item: item[1])
    # Keys: an 8-bit index per outlier, and each token's start; values: a 16-bit index per outlier.
    packed = heads * tokens * (share * REAL.head_dim * (3 if scores else 4) + (2 if scores else 0))
    # The scores kernel writes a bias; the mixtures kernel reads scores, and reads and writes mixtures.
    moved = packed + 4 * heads * query_rows * (tokens + (0 if scores else 2 * splits * REAL.head_dim))
    seconds = {
        "bytes": moved / device.copied(1.0),
        pipe: turns * -(-programs * loop["warps"] // SCHEDULERS) * most / device.hertz,
        "waits": turns
        * -(-programs // at_once)
        * (loop["around"]["alone"] + inner * loop["inside"]["alone"])
        / device.hertz,
    }
    grid = {"splits": splits, "turns": turns, "programs": programs}
    return {
        "loop": loop["name"],
        "packed": packed,
        **grid,
        "seconds": seconds,
        "bound": max(seconds, key=seconds.__getitem__),
    }
