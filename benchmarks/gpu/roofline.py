"""Predicts, without a GPU, the time of a decode step from attention's compiled loops: bytes, instructions, waits and launches.

    python -m benchmarks.gpu.roofline [--write]

compiles the loops of the targets' steps, reads their disassembly, counts the steps' launches, and prints a page, which `--write`
saves as docs/results/gpu/roofline.md, and its numbers as benchmarks/results/gpu_roofline.json. Nothing is measured.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import BASELINE_NODES, COPY, DEVICES, NODE, Device
from benchmarks.gpu.encoding_cost import found_encoding
from benchmarks.gpu.loop_clocks import busy
from benchmarks.gpu.prefill_cost import found_prefill
from benchmarks.gpu.sizes import REAL
from calib.kernels.ahead_of_time import CAPABILITIES, Specialisation, compiled
from calib.kernels.attend.options import CHANNEL, PROGRAMS, TOKEN, runs_of
from calib.kernels.compiled_loop import LoopFigures, loop_figures
from calib.kernels.occupancy import SCHEDULERS, programs_at_once
from calib.kernels.turn_alone import turn_alone

ROOT = Path(__file__).parents[2]
RESULT, PAGE = ROOT / "benchmarks/results/gpu_roofline.json", ROOT / "docs/results/gpu/roofline.md"


@dataclass(frozen=True)
class Case:
    """A decode step of a layer.

    Args:
        name: the name of its target in `targets.TARGETS`, if it has one.
        method: the method whose launches are counted.
        loops: the specialisation of each launch of attention's kernel, with its share of the tokens.
        rows, kv_heads, query_rows: rows of the batch, KV heads of a row, query rows of a KV head.
        copy_row: name of the target for its share of the copy rate, if it has one.
        outliers: the share of entries stored in outlier lists; then attention also reads a bias and writes its scores.
    """

    name: str
    method: str
    loops: Mapping[str, float]
    rows: int = REAL.batch
    kv_heads: int = REAL.kv_heads
    query_rows: int = REAL.heads // REAL.kv_heads
    copy_row: str | None = None
    outliers: float = 0.0


TIERS = {"4 bits, ranges of channels": 0.6, "2 bits, ranges of channels": 0.4}
KIVI = {bits: {f"{bits} bits, per channel of 128, ahead": 1.0} for bits in (4, 2)}

CASES = (
    Case("decode attention, 60/40 of 4/2 bits : SDPA", "zipcache", TIERS),
    Case("the same, MHA 32k x 1", "zipcache", TIERS, 1, REAL.heads, 1),
    Case("uniform 4 bit, g = 128 : SDPA", "kivi", KIVI[4], copy_row="share of the copy rate, 4 bit"),
    Case("uniform 2 bit, g = 128 : SDPA", "kivi", KIVI[2], copy_row="share of the copy rate, 2 bit"),
    Case("GEAR : SDPA", "gear", {"4 bits, ranges of channels, rank 4": 1.0}, outliers=0.02),
    Case("`rtn`, 4 bits of a token", "rtn", {"4 bits, keys per token": 1.0}),
    Case("`klt`, 2 bits, keys before RoPE", "klt", {"6 4 3 2 1 bits, 16 words, turned": 1.0}),
    Case("the same, sizes and predicted values", "klt", {"6 4 3 2 1 bits, turned, mixed": 1.0}),
)


def bytes_of_token(one: Specialisation) -> float:
    """Returns the bytes of a token's keys and values of one KV head that this kernel reads, parameters included."""
    given: Any = one.constants
    found = 0.0
    for role, letter in (("KEY", "K"), ("VALUE", "V")):
        found += 2 * given[f"W{letter}"] + 2 * given[f"{role}_RANK"]
        if given[f"{role}_MODE"] == TOKEN:
            found += 4 * given[f"{role}_GROUPS"]
        elif given[f"{role}_MODE"] == CHANNEL:
            found += 4 * given[f"D{letter}"] / given[f"{role}_TOKENS"]
        found += 0 if given.get(f"{role}_SIZES", True) is None else 0.5
    return found


def loop_of(name: str, one: Specialisation, capability: int, figures: LoopFigures) -> dict[str, Any]:
    """Returns the figures of a compiled loop."""
    alone = turn_alone(figures.lines)
    return {
        "name": name,
        "capability": capability,
        "warps": one.warps,
        "registers": figures.registers,
        "spilled": figures.spilled,
        "shared": figures.shared,
        "launched": max(PROGRAMS, one.programs),
        "programs": programs_at_once(figures.registers, figures.shared, one.warps, capability),
        "tokens": one.constants["BN"],
        "page": one.constants["PAGE"],
        "bytes_of_token": bytes_of_token(one),
        "codes": one.codes,
        "instructions": len(figures.lines),
        "instructions_of_code": round(figures.cost(one.codes, one.warps), 3),
        "loads": figures.loads,
        "bytes_ahead": figures.bytes_ahead(one.warps),
        "barriers": figures.barriers,
        "waits": alone.waits,
        "alone": alone.clocks,
        "busy": busy(figures.lines, capability) if capability in {own.capability for own in DEVICES.values()} else {},
    }


def attended(loop: Mapping[str, Any], tokens: int, case: Case, device: Device) -> dict[str, Any]:
    """Returns the seconds of a launch of attention over `tokens` tokens of every row, by each limit: bytes, busiest pipe, waits.

    A program processes a run of turns of one row's KV head. The multiprocessor with the most programs finishes last.
    """
    heads, every = case.rows * case.kv_heads, loop["launched"] * device.multiprocessors
    turns = -(-tokens // loop["page"]) * -(-loop["page"] // loop["tokens"])
    run, splits = runs_of(turns, every // heads)
    programs = -(-heads * splits // device.multiprocessors)
    at_once = min(programs, loop["programs"])
    pipe, clocks = max(loop["busy"].items(), key=lambda item: item[1])
    packed = heads * tokens * loop["bytes_of_token"]
    # Every part is written once and read once: top, mass and a mixture in float32.
    parts = 2 * 4 * heads * splits * case.query_rows * (REAL.head_dim + 2)
    beside = 2 * 4 * heads * tokens * case.query_rows * bool(case.outliers)
    seconds = {
        "bytes": (packed + parts + beside) / device.copied(1.0),
        pipe: run * -(-programs * loop["warps"] // SCHEDULERS) * clocks / device.hertz,
        "waits": run * -(-programs // at_once) * loop["alone"] / device.hertz,
    }
    bound = max(seconds, key=seconds.__getitem__)
    grid = {"splits": splits, "turns": run, "programs": programs}
    return {"loop": loop["name"], "packed": packed, **grid, "seconds": seconds, "bound": bound}


def predicted(
    case: Case, loops: Mapping[tuple[str, int], Mapping[str, Any]], launches: int, device: Device
) -> dict[str, Any]:
    """Returns the prediction of a step: its launches of attention in sequence, plus the cost of all launches.

    It is compared with SDPA over the same tokens in 16 bits, assumed to be limited by bytes alone.
    """
    parts = [
        attended(loops[name, device.capability], round(share * REAL.tokens), case, device)
        for name, share in case.loops.items()
    ]
    if case.outliers:
        from benchmarks.gpu.roofline_lists import MIXTURES, SCORES, listed

        heads, splits = case.rows * case.kv_heads, parts[0]["splits"]
        lists = [loops[name, device.capability] for name in (SCORES, MIXTURES)]
        parts += [listed(own, case.outliers, splits, device, heads, case.query_rows) for own in lists]
    attention = sum(part["seconds"][part["bound"]] for part in parts)
    packed = sum(part["packed"] for part in parts)
    exact = case.rows * case.kv_heads * REAL.tokens * 2 * REAL.head_dim * 2
    baseline = [exact / device.copied(1.0) + BASELINE_NODES * node for node in NODE]
    step = [attention + launches * node for node in NODE]
    return {
        "case": case.name,
        "device": device.name,
        "method": case.method,
        "copy_row": case.copy_row,
        "parts": parts,
        "bits_per_value": 8 * packed / (exact / 2),
        "attention": attention,
        "launches": launches,
        "step": step,
        "sdpa": baseline,
        "speedup_of_attention": exact / device.copied(1.0) / attention,
        "speedup": [above / below for above, below in zip(reversed(baseline), reversed(step), strict=True)],
        "share_of_copy": [packed / device.copied(taken) for taken in reversed(step)],
        "share_of_copy_of_attention": packed / device.copied(attention),
    }


def launches_of(methods: Iterable[str]) -> dict[str, int]:
    """Returns the launches of a decode step in a layer, by method, from `python -m benchmarks.gpu.launches`."""
    command = [sys.executable, "-m", "benchmarks.gpu.launches", *methods]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"^(\w+) +\d+ +\d+ +(\d+) ", table, re.M)}


def found() -> dict[str, Any]:
    """Returns all numbers of the page."""
    from benchmarks.gpu.roofline_lists import list_loops
    from calib.kernels.attend.specialisations import SPECIALISATIONS

    launches = launches_of(sorted({case.method for case in CASES}))
    loops = [
        loop_of(name, SPECIALISATIONS[name], capability, loop_figures(compiled(SPECIALISATIONS[name], capability)))
        for name in dict.fromkeys(name for case in CASES for name in case.loops)
        for capability in CAPABILITIES
    ]
    lists = list_loops()
    by_name = {(loop["name"], loop["capability"]): loop for loop in (*loops, *lists)}
    steps = [predicted(case, by_name, launches[case.method], own) for case in CASES for own in DEVICES.values()]
    return {
        "triton": version("triton"),
        "devices": [asdict(own) for own in DEVICES.values()],
        "copy": COPY,
        "node_seconds": list(NODE),
        "launches": launches,
        "loops": loops,
        "lists": lists,
        "outliers": max(case.outliers for case in CASES),
        "steps": steps,
        "prefill": found_prefill(),
        "encoding": found_encoding(),
    }


def main() -> None:
    """Prints the page; with `--write` saves it and its numbers."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument(
        "--write", action="store_true", help=f"keep {PAGE.relative_to(ROOT)} and {RESULT.relative_to(ROOT)}"
    )
    given = asked.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # before a kernel is imported: interpreted ones are not compiled
    from benchmarks.gpu.roofline_page import page
    from benchmarks.gpu.roofline_page import runs as measured

    run = found()
    text = page(run, measured())
    print(text)
    if given.write:
        RESULT.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
