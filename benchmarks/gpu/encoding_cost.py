"""Predicts the targets of encoding alone from counts: quantising and packing against `clone()`, and probes against attention. The
limits are those of `prefill_cost.py`, and nothing is measured.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.devices import DEVICES, Device
from benchmarks.gpu.page_tables import measured, shown, table
from benchmarks.gpu.prefill_cost import ROOT, group_seconds, grouped
from benchmarks.gpu.prefill_kernels import key_of, read, specialisation
from benchmarks.gpu.sizes import REAL
from benchmarks.gpu.targets import TARGETS

Run = Mapping[str, Any]

ROWS = {
    "one pass": "quantise and pack, one pass : clone()",
    "two passes": "quantise and pack, two passes : clone()",
}
PROBES = "probe saliency : flash forward, 32k"

TEXT = """
## Encoding alone

The time of quantising and packing the keys and values of shape A at 4 bits, over that of `clone()`, which reads and writes them.
*One pass*: groups of 32 tokens of a key channel, and of 32 channels of a token's value. *Two passes*: ranges of channels are
measured first. *Probes*: the pass over ZipCache's probes, over attention's time, as in the [prefill](#prefill). Each kernel takes
the longest of its times by each limit, without its launch; *bound by* is this limit, kernel by kernel. The measured ratios are of
earlier kernels, and of ranges that torch measured. Matching pursuit, dictionaries, fetches and whole models are not predicted.

"""


def encoded_values() -> int:
    """Returns the keys and values of shape A."""
    return 2 * REAL.batch * REAL.kv_heads * REAL.tokens * REAL.head_dim


def clone_seconds(device: Device) -> float:
    """Returns the time of `clone()`: each number of 16 bits is read and written."""
    return 4 * encoded_values() / device.copied(1.0)


def predicted(way: str, launched: Run, kernels: Mapping[str, Run], device: Device) -> dict[str, Any]:
    """Returns the seconds of all kernels and operations of `way` on a GPU, and their ratio to those of `clone()`."""
    parts = []
    for group in launched["ours"]:
        seconds = group_seconds(group, kernels[f"{group['kernel']} for sm_{device.capability}"], device)
        bound = max(seconds, key=seconds.__getitem__)
        parts.append({"kernel": group["kernel"], "seconds": seconds, "bound": bound})
    moved = sum(own["bytes"] for own in launched["torch"].values()) / device.copied(1.0)
    whole = sum(part["seconds"][part["bound"]] for part in parts) + moved
    ratio = whole / clone_seconds(device)
    return {"way": way, "device": device.name, "parts": parts, "torch": moved, "seconds": whole, "ratio": ratio}


def found_encoding() -> dict[str, Any]:
    """Returns all numbers of the page's part on encoding alone. Launches are counted by `prefill_launches.py`, a separate process
    because it interprets kernels."""
    command = [sys.executable, "-m", "benchmarks.gpu.prefill_launches", "90", *ROWS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    noted = json.loads(done.stdout)
    names: dict[str, str] = {}
    launched = {way: own | {"ours": grouped(own["ours"], names)} for way, own in noted.items()}
    kernels = {
        f"{names[key_of(launch)]} for sm_{capability}": read(specialisation(launch), capability)
        for launch in (launch for own in noted.values() for launch in own["ours"])
        for capability in dict.fromkeys(own.capability for own in DEVICES.values())
    }
    steps = [predicted(way, launched[way], kernels, own) for way in ROWS for own in DEVICES.values()]
    return {"launched": launched, "kernels": kernels, "steps": steps}


def rows(run: Run, of: Sequence[Run]) -> Iterator[list[object]]:
    """Yields a row for each target and GPU; `run` is the whole run, `of` are measured runs."""
    targets = {target.name: target for target in TARGETS}

    def row(name: str, device: str, value: float, bound: str) -> list[object]:
        target = targets[name]
        limits = [target.shown(target.accept), target.shown(target.stretch)]
        found = shown(value, target.unit)
        return [name, device, found, *limits, measured(name, device, of), bound]

    for step in run["encoding"]["steps"]:
        bound = ", ".join(part["bound"] for part in step["parts"])
        yield row(ROWS[step["way"]], step["device"], step["ratio"], bound)
    for step in run["prefill"]["steps"]:
        if step["method"] == "zipcache":
            scored = next(part for part in step["parts"] if part["kernel"].startswith("column_sums"))
            attention = run["prefill"]["baseline"][step["device"]]["attention"]
            yield row(PROBES, step["device"], step["probes"] / attention, scored["bound"])


def section(run: Run, of: Sequence[Run]) -> str:
    """Returns the section; `run` is the whole run, `of` are measured runs."""
    return TEXT + table(["row", "GPU", "predicted", "accept", "stretch", "measured", "bound by"], rows(run, of))
