"""Compiles the kernels that a prefill launches, as they are launched, and reads their disassembly part by part.

A part is the code that a program runs equally often: "once"; "turn", a turn over channels in `project` or over tokens in
`channel_extremes`; in row_normalisers and column_sums "inside", a turn over a tile that all rows see, "edge", a turn with the
causal mask applied, and "head", the start of each query head of a group; in `largest` "count", a counted tile, for each "digit",
and "collect", a tile whose positions are collected.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from importlib import import_module
from math import prod
from typing import Any

from benchmarks.gpu.loop_clocks import busy
from calib.kernels.ahead_of_time import Specialisation, compiled
from calib.kernels.compiled_loop import code_and_loops, disassembled
from calib.kernels.occupancy import programs_at_once
from calib.kernels.turn_alone import turn_alone

Launch = Mapping[str, Any]  # a `prefill_launches.KernelLaunch` as a dict

ONCE, TURN, HEAD, EDGE, INSIDE = "once", "turn", "head", "edge", "inside"
COUNT, COLLECT, DIGIT = "count", "collect", "digit"
SCORED = ("row_normalisers", "column_sums")
COPIED, CHOSEN = "put", "rows_of_probes"
PROJECTED, SELECTED = "project", "largest"
EXTREMES, MEASURED = "channel_extremes", "channel_numbers"
# Kernels with two innermost loops: the names of the shorter one, the longer one, and the code around them.
NESTED = dict.fromkeys(SCORED, (INSIDE, EDGE, HEAD)) | {SELECTED: (COUNT, COLLECT, DIGIT)}
INNERMOST = dict.fromkeys(NESTED, 2) | {PROJECTED: 1, EXTREMES: 1}  # number of innermost loops


def specialisation(launch: Launch) -> Specialisation:
    """Returns what Triton compiles for the launch: it specialises integers divisible by 16 and those equal to 1, where allowed."""
    kernel = getattr(import_module(launch["module"]), launch["kernel"])
    types: dict[str, str] = {}
    constants: dict[str, object] = {}
    for own in kernel.params:
        kind, value = launch["types"].get(own.name), launch["values"].get(own.name)
        if kind is None:
            # WIDE is a flag that is only set in the interpreter.
            constants[own.name] = False if own.name == "WIDE" and value is True else value
        elif kind == "i32" and not own.do_not_specialize and value == 1:
            constants[own.name] = 1
        elif kind == "i32" and not own.do_not_specialize and value % 16 == 0:
            types[own.name] = "i32:16"
        else:
            types[own.name] = kind
    return Specialisation(kernel, types, constants, launch["warps"], launch["stages"], fusion=launch["fusion"])


def key_of(launch: Launch) -> str:
    """Returns a key that is equal for launches of the same compiled kernel."""
    one = specialisation(launch)
    return repr((launch["kernel"], sorted(one.types.items()), sorted(one.constants.items()), one.warps, one.stages))


def read(one: Specialisation, capability: int) -> dict[str, Any]:
    """Returns registers, programs at once and parts of a compiled kernel."""
    kernel = compiled(one, capability)
    listing, used = disassembled(kernel)
    parts = parts_of(listing, one.kernel.__name__)
    return {
        "capability": capability,
        "warps": one.warps,
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "programs": programs_at_once(used["REG"], kernel.metadata.shared, one.warps, capability),
        "parts": {
            name: {
                "instructions": len(lines),
                "busy": busy(lines, capability),
                "alone": turn_alone(lines).clocks,
            }
            for name, lines in parts.items()
            if lines
        },
    }


def parts_of(listing: str, kernel: str) -> dict[str, list[str]]:
    """Returns the instructions of each part. Raises ValueError if the kernel's loops are not those expected."""
    known = INNERMOST.get(kernel, 0)
    code, loops = code_and_loops(listing)
    loops = sorted(set(loops), key=lambda ends: ends[1] - ends[0])
    innermost = [one for one in loops if not any(_within(other, one) for other in loops if other != one)]
    if len(innermost) != known or len(loops) - known > (kernel in NESTED):
        raise ValueError(f"loops at {loops}, expected {('none', 'one', 'two, or two in one')[known]}")
    if kernel not in NESTED:
        turn = {at for start, stop in innermost for at in range(start, stop + 1)}
        return {ONCE: [line for at, line in enumerate(code) if at not in turn], TURN: [code[at] for at in sorted(turn)]}
    shorter, longer = ({*range(start, stop + 1)} for start, stop in innermost)
    outer = [one for one in loops if one not in innermost]
    around = {at for start, stop in outer for at in range(start, stop + 1)} - shorter - longer
    of_part = dict(zip(NESTED[kernel], (shorter, longer, around), strict=True))
    rest = {*range(len(code))} - shorter - longer - around
    return {name: [code[at] for at in sorted(lines)] for name, lines in {**of_part, ONCE: rest}.items()}


def _within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def turns_of(launch: Launch) -> dict[str, int]:
    """Returns how often each part is run, by all programs together."""
    programs = prod(launch["grid"])
    positions, given = launch["probes"], launch["values"]
    if launch["kernel"] == PROJECTED:
        return {ONCE: programs, TURN: programs * -(-given["D"] // given["BD"])}
    if launch["kernel"] == SELECTED:
        tiles = programs * -(-given["tokens"] // given["TILE"])
        return {ONCE: programs, DIGIT: 4 * programs, COUNT: 4 * tiles, COLLECT: tiles}
    if launch["kernel"] == EXTREMES:
        return {ONCE: programs, TURN: programs * given["turns"]}
    if launch["kernel"] == COPIED:  # a program copies to one of the tensors, each of which has its own instructions
        return {ONCE: programs // launch["grid"][2]}
    if launch["kernel"] not in SCORED:
        return {ONCE: programs}
    owned, streamed, tokens = given["OWNED"], given["STREAMED"], given["tokens"]
    edge = inside = 0
    if launch["kernel"] == "row_normalisers":
        tiles = range(0, len(positions), owned)
        for start in tiles:
            seen = min(positions[start] + 1, tokens) // streamed
            stop = min(positions[min(start + owned, len(positions)) - 1] + 1, tokens)
            inside, edge = inside + seen, edge + -(-stop // streamed) - seen
        copies = programs // len(tiles)
        return {ONCE: programs, EDGE: copies * edge, INSIDE: copies * inside}
    tiles = range(0, tokens, owned)
    for start in tiles:
        first, after = (bisect_left(positions, edge_at + given["nearest"]) for edge_at in (start, start + owned))
        stop = bisect_right(positions, start + owned - 1 + given["farthest"])
        met = -(-after // streamed)
        edge, inside = edge + met - first // streamed, inside + max(0, -(-stop // streamed) - met)
    copies, group = programs // len(tiles), given["group"]
    return {ONCE: programs, HEAD: programs * group, EDGE: copies * group * edge, INSIDE: copies * group * inside}


def elements_of(launch: Launch) -> int:
    """Returns the elements that a launch processes: values encoded, measured or copied, logits, scores, or extremes merged."""
    given, grid = launch["values"], launch["grid"]
    if launch["kernel"] == COPIED:
        return int(sum(given[f"count_{i}"] * given[f"heads_{i}"] * given[f"width_{i}"] for i in range(grid[2])))
    if launch["kernel"] in SCORED:
        turns = turns_of(launch)
        return (turns[EDGE] + turns[INSIDE]) * int(given["OWNED"] * given["STREAMED"])
    if launch["kernel"] == PROJECTED:
        return int(given["tokens"] * given["lines"] * given["D"])
    if launch["kernel"] == SELECTED:
        return int(given["tokens"] * grid[0])
    if launch["kernel"] == MEASURED:
        return int(2 * (given["parts"] + given["asked"]) * prod(grid) * given["D"])
    if launch["kernel"] == CHOSEN:  # the programs of a head are consecutive in the grid
        heads = grid[0] // -(-given["probes"] // given["OWNED"])
        return int(heads * given["probes"] * ((given["D"] if given["CHOSEN"] else 0) + given["SUMMED"]))
    return int(given["total"] * grid[1] * grid[2] * given["D"])


def bytes_of_launch(launch: Launch) -> int:
    """Returns the least bytes that a launch moves: of tokens those encoded or measured, of other tensors everything once."""
    tensors = launch["tensors"]
    if launch["kernel"] in (*NESTED, MEASURED):
        return sum(tensors.values())
    if launch["kernel"] == COPIED:  # writes as much as it reads, not the whole target
        return sum(
            size * (2 if name.startswith("TOKENS") else 1) for name, size in tensors.items() if "INTO" not in name
        )
    if launch["kernel"] == CHOSEN:  # reads as much as it writes, not the whole source
        values = launch["values"]
        written = (tensors["asked"] if values["CHOSEN"] else 0) + (tensors["normalisers"] if values["SUMMED"] else 0)
        return 2 * written + tensors["positions"]
    given = {"X", "x", "x_1"} & tensors.keys()
    widths = {launch["types"][name] for name in given - {"x_1"}}
    # Unused arguments are given another tensor, which does not count.
    unused = {"COMPONENTS", "NUMBERS", "WEIGHTS"} if launch["kernel"] == PROJECTED else set()
    unused -= {name for name, asked in (("NUMBERS", "SIZED"), ("WEIGHTS", "SIZED")) if launch["values"].get(asked)}
    width = 4 if "*fp32" in widths else 2
    return sum(size for name, size in tensors.items() if name not in given | unused) + width * elements_of(launch)


def through_cache(launch: Launch) -> int:
    """Returns the bytes of 16-bit tiles that all programs of a score kernel stream, mostly from the L2; 0 for other kernels."""
    given = launch["values"]
    return elements_of(launch) // int(given["OWNED"]) * int(given["D"]) * 2 if launch["kernel"] in SCORED else 0
