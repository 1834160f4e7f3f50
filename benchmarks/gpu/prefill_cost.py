"""Predicts from counts what methods add to a prefill of 32,768 tokens: each launch takes the largest of its limits' times, torch's
operations the time of their bytes. It is compared with the fastest possible prefill without compression. Nothing is measured.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import DEVICES, NODE, Device
from benchmarks.gpu.loop_clocks import MATRIX
from benchmarks.gpu.prefill_kernels import (
    SCORED,
    Launch,
    bytes_of_launch,
    elements_of,
    key_of,
    read,
    specialisation,
    through_cache,
    turns_of,
)
from benchmarks.gpu.sizes import REAL, Sizes
from calib.kernels.occupancy import SCHEDULERS

ROOT = Path(__file__).parents[2]

METHODS = ("kivi", "rtn", "zipcache", "mikv", "klt")
TARGET_ROWS = {
    name: f"prefill overhead, {shown}, 32k"
    for name, shown in (("kivi", "KIVI"), ("zipcache", "ZipCache"), ("mikv", "MiKV"))
}

# Products per multiprocessor and clock, of float32 outside and of float64 inside the matrix units: 19.5 TFLOP/s of either on an
# A100, 67 on an H100 (data sheets).
WIDE_PRODUCTS = {80: 64, 90: 128}


def dense(device: Device) -> float:
    """Returns the dense 16-bit products per second, by the data sheet."""
    return MATRIX[device.capability] * SCHEDULERS * device.multiprocessors * device.hertz


def baseline(device: Device, size: Sizes = REAL) -> dict[str, float]:
    """Returns the least seconds of a layer without compression, by part.

    It is the larger of matrix products at the peak rate and bytes at the rate of a copy. Norms, RoPE and other small operations
    cost nothing.
    """
    tokens, heads, kv_heads, width = size.prompt, size.heads, size.kv_heads, size.head_dim
    shapes = {
        "projections": [(size.hidden, (heads + 2 * kv_heads) * width), (heads * width, size.hidden)],
        "MLP": [(size.hidden, 2 * size.intermediate), (size.intermediate, size.hidden)],
    }
    found = {}
    for name, products in shapes.items():
        work = tokens * sum(prod(shape) for shape in products)
        moved = 2 * sum(prod(shape) + tokens * sum(shape) for shape in products)
        found[name] = max(work / dense(device), moved / device.copied(1.0))
    work = 2 * heads * width * tokens * (tokens + 1) // 2
    moved = 2 * tokens * width * 2 * (heads + kv_heads)
    found["attention"] = max(work / dense(device), moved / device.copied(1.0))
    return found


def grouped(ours: Iterable[Launch], kernels: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the launches summed by compiled kernel; `kernels` maps keys to names, and new kernels are added to it."""
    found: dict[str, dict[str, Any]] = {}
    for launch in ours:
        name = kernels.setdefault(key_of(launch), named(launch, kernels.values()))
        own = found.setdefault(name, {"kernel": name, "grids": [], "turns": {}, "elements": 0, "bytes": 0, "cache": 0})
        own["grids"].append(prod(launch["grid"]))
        own["turns"] = {part: own["turns"].get(part, 0) + count for part, count in turns_of(launch).items()}
        own["elements"] += elements_of(launch)
        own["bytes"] += bytes_of_launch(launch)
        own["cache"] += through_cache(launch)
    return list(found.values())


def named(launch: Launch, taken: Iterable[str]) -> str:
    """Returns the kernel's name with its bits, and a number if that name is taken."""
    bits = launch["values"].get("BITS")
    stem = launch["kernel"] if bits is None else f"{launch['kernel']}, {bits} bits"
    number = sum(name == stem or name.startswith(f"{stem}, no. ") for name in taken)
    return f"{stem}, no. {number + 1}" if number else stem


def group_seconds(group: Mapping[str, Any], kernel: Mapping[str, Any], device: Device) -> dict[str, float]:
    """Returns the seconds of all launches of a kernel by each limit.

    "bytes": at the rate of a copy. The busiest pipe: with programs spread evenly over the multiprocessors. "waits": the time of one
    program alone, times the number of rounds in which programs run one after the other.
    """
    clocks: dict[str, float] = {}
    alone = 0.0
    for part, turns in group["turns"].items():
        own = kernel["parts"][part]
        alone += turns * own["alone"]
        for pipe, taken in own["busy"].items():
            clocks[pipe] = clocks.get(pipe, 0.0) + turns * kernel["warps"] * taken
    programs, room = sum(group["grids"]), device.multiprocessors * kernel["programs"]
    rounds = sum(-(-grid // room) for grid in group["grids"])
    pipe, most = max(clocks.items(), key=lambda item: item[1])
    busy = sum(most * grid / programs / min(grid, device.multiprocessors) for grid in group["grids"])
    return {
        "bytes": group["bytes"] / device.copied(1.0),
        pipe: busy / SCHEDULERS / device.hertz,
        "waits": alone / programs * rounds / device.hertz,
    }


def predicted(
    method: str, launched: Mapping[str, Any], kernels: Mapping[str, Mapping[str, Any]], device: Device
) -> dict[str, Any]:
    """Returns what a method adds to a layer's prefill on a GPU, in seconds, and as a share of the prefill."""
    parts = []
    for group in launched["ours"]:
        kernel = kernels[f"{group['kernel']} for sm_{device.capability}"]
        seconds = group_seconds(group, kernel, device)
        bound = max(seconds, key=seconds.__getitem__)
        lines = sum(turns * kernel["parts"][part]["instructions"] for part, turns in group["turns"].items())
        instructions = lines * 32 * kernel["warps"] / group["elements"]
        cost = {"kernel": group["kernel"], "launches": len(group["grids"]), "seconds": seconds, "bound": bound}
        parts.append(cost | {"bytes": group["bytes"], "instructions": round(instructions, 3)})
    moved = sum(own["bytes"] for own in launched["torch"].values()) / device.copied(1.0)
    products = sum(own["products"] for own in launched["torch"].values())
    torch_seconds = moved + products / (WIDE_PRODUCTS[device.capability] * device.multiprocessors * device.hertz)
    launches = sum(part["launches"] for part in parts) + sum(own["launches"] for own in launched["torch"].values())
    scored = sum(part["seconds"][part["bound"]] for part in parts if part["kernel"].startswith(SCORED))
    encoding = sum(part["seconds"][part["bound"]] for part in parts) - scored
    whole, work = sum(baseline(device).values()), scored + encoding + torch_seconds
    return {
        "method": method,
        "device": device.name,
        "parts": parts,
        "probes": scored,
        "encoding": encoding,
        "torch": torch_seconds,
        "launches": launches,
        "waits": launched["waits"],
        "prefill": whole,
        "share": [(work + launches * node) / whole for node in NODE],
        "share_of_work": work / whole,
        "share_beside": beside(parts, launched, device) / whole,
    }


def beside(parts: Iterable[Mapping[str, Any]], launched: Mapping[str, Any], device: Device) -> float:
    """Returns the seconds that a side stream would still add if its bytes and launches were hidden completely.

    This is the time of its programs in schedulers and pipes, which limit the prefill; of torch only matrix products count.
    """
    busy = sum(
        max(taken for name, taken in part["seconds"].items() if name not in ("bytes", "waits")) for part in parts
    )
    products = sum(own["products"] for own in launched["torch"].values())
    return float(busy + products / (WIDE_PRODUCTS[device.capability] * device.multiprocessors * device.hertz))


def launched_by(capability: int) -> dict[str, Any]:
    """Returns the output of `python -m benchmarks.gpu.prefill_launches`, a separate process because it interprets kernels."""
    command = [sys.executable, "-m", "benchmarks.gpu.prefill_launches", str(capability), *METHODS]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    return found


def found_prefill() -> dict[str, Any]:
    """Returns all numbers of the page's part on prefills; launches differ between capabilities, as tile sizes do."""
    names: dict[str, str] = {}
    launched: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    for capability in dict.fromkeys(own.capability for own in DEVICES.values()):
        noted = launched_by(capability)
        launched[str(capability)] = {
            method: own | {"ours": grouped(own["ours"], names)} for method, own in noted.items()
        }
        for launch in (launch for own in noted.values() for launch in own["ours"]):
            name = f"{names[key_of(launch)]} for sm_{capability}"
            kernels[name] = kernels.get(name) or read(specialisation(launch), capability)
    return {
        "launched": launched,
        "kernels": kernels,
        "baseline": {own.name: baseline(own) for own in DEVICES.values()},
        "steps": [
            predicted(method, launched[str(own.capability)][method], kernels, own)
            for method in METHODS
            for own in DEVICES.values()
        ],
    }
