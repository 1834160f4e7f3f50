"""Writes the part on prefills of docs/results/gpu/roofline.md, from the numbers of `prefill_cost.py`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.devices import DEVICES
from benchmarks.gpu.page_tables import between, measured, table
from benchmarks.gpu.prefill_cost import METHODS, TARGET_ROWS, dense
from benchmarks.gpu.prefill_kernels import EXTREMES
from benchmarks.gpu.sizes import REAL
from benchmarks.gpu.targets import TARGETS

Run = Mapping[str, Any]

CAPABILITY = "90"  # compute capability whose launches the page describes

SHARES = """
## Prefill

What encoding adds to a prompt of 32,768 tokens, one sequence, in a layer of the 8B shape. *probes* is the kernel
that scores (`column_sums`), *encoding* is every other kernel of ours, *torch* are operations of torch
by their bytes at the rate of a copy. *work* is these three over the prefill without compression; *share* adds what
all launches cost, {node} us each. *beside* is what would be left of it on a side stream, see below.

"""

BASELINE = """
The prefill without compression is taken at its best, which makes every share as large as it can be: matrix products at
the peak of the data sheet ({dense} TFLOP/s at the clocks below), all of them one after the other, nothing else. Ours
are taken at their limits, too. Where both reach the same part of their limit, the share stays what it is.

"""

PARTS = """
### Where a prefill's prediction comes from

Microseconds of all launches of a kernel in a layer by each limit, on an {device}. *a value*: instructions of a lane
for a value that is encoded, a logit of the probes, or a score. "no. 2" is the same kernel compiled for other arguments.

"""

OPERATIONS = """
### Operations of torch

In a layer, besides our kernels. Bytes are those that each operation must read and write; products are of float64.

"""

SAID = """
### What is above the targets, and what would lower it

- **ZipCache's probes** are {probes:.1f} % on an {device}: one pass over {rows:.1%} of the pairs that attention sees, with half of
  its products. The sums of its rows are attention's own, which torch's flash backend gives back
  (`runtime/attend/prompt_attention.py`); another backend leaves them to a pass before, as long as this one.
- **MiKV scores with every row.** Its pass has half of the products of attention itself, and no kernel brings that
  below {mikv:.0f} % of the prefill. `probes="random+recent"` makes it ZipCache's.
- **Little is left inside a pass** on an H100: exponentials ({special} clocks of a scheduler for a turn of a warp), issue
  ({issue}) and matrix products ({matrix}) take nearly as long as each other. On an A100 the products' operands come through
  shared memory ({memory} clocks beside {matrix_80} of matrix products, of tiles of 256 keys).
- **Ranges** are asked for {ranges} times in a layer of ZipCache, {range_bytes:.0f} MB: those of a tier's keys, of all values
  (`kernels/channel_ranges`), which also tell whether values' parameters fit 16 bits, and of all keys, which tell it of keys.
- **Copies** of words and parameters into pages are one launch for a tier (`kernels/put_tokens`).
- **Launches** of ZipCache are {launches}, {nodes:.1f} % at the dearer price; what the host works out by itself is none, and neither
  is an operation without a number to write. A codec with a kernel encodes a tier at
  once, in {encoded} launches of ours for all; one without takes pieces of 4,096 tokens, which bound what it holds in float32.
- **`klt`** turns a prompt's keys back to before RoPE in one launch (`kernels/unrotate`), and encodes a piece of 4,096 tokens in one
  of each stream: components, codes and words. That is {project:.1f} % of the prefill, and {klt:,.0f} MB of a layer are left to
  torch. Plain torch, with products in float64, moves 10,067 MB and launches 467 operations: 16 to 17 % on an {device}.
- **The host waits** for all that it has given the device {waits} times in a layer of ZipCache and {waits_kivi} times in KIVI's:
  after such a wait the device stands still for as long as the host takes to go on, which no count shows, and 4 % of a layer
  are {stretch:.0f} us. Whether parameters fit 16 bits follows from the extremes of a layer's first tokens. They are on their way to
  the host before attention is queued, and read behind it: the device attends while the host goes on to encode.

### What a side stream could hide

A prefill is bound by matrix products, and its memory is nearly idle. What is bound by bytes can run beside it, and so
can the gaps of launches; what issues instructions competes with it. So of the share at most this is left, in the
column *beside*: what our programs take from schedulers and pipes. For KIVI that is {kivi:.1f} % of {kivi_share:.1f} %; for
ZipCache {zipcache:.1f} % of {zipcache_share:.1f} %, since its probes are bound by arithmetic, which no stream hides.

### What is left out of it

- The L2: tiles that the probes' programs stream are read from it again by each, {cache:.0f} GB in a layer of ZipCache
  against {cache_of_attention:.0f} GB that attention reads in tiles of 128 query rows. No data sheet states its rate.
- Nothing is sorted: `kernels/top_k` divides a prompt's tokens among tiers in one launch. Torch sorts fewer than 128 rows one after
  the other, each in several launches, which no count of operations shows.
- Norms, RoPE, residuals and the copy that DynamicCache makes: they would lengthen the prefill without compression.
"""


def share_rows(run: Run, of: Sequence[Run]) -> Iterator[list[object]]:
    """Yields a row for each method and GPU."""
    targets = {target.name: target for target in TARGETS}
    for step in run["steps"]:
        target = targets.get(TARGET_ROWS.get(step["method"], ""))
        limits = [target.shown(target.accept), target.shown(target.stretch)] if target else ["", ""]
        found = measured(target.name, step["device"], of) if target else ""
        times = [f"{1e6 * step[part]:,.0f}" for part in ("probes", "encoding", "torch")]
        shares = [
            f"{step['share_of_work']:.1%}",
            between(*step["share"], unit="%", digits=1),
            f"{step['share_beside']:.1%}",
        ]
        known = [f"`{step['method']}`", step["device"], f"{1e3 * step['prefill']:.1f} ms"]
        yield [*known, *times, step["launches"], *shares, *limits, found]


def part_rows(run: Run, device: str) -> Iterator[list[object]]:
    """Yields a row for each method and kernel."""
    for step in run["steps"]:
        for part in step["parts"] if step["device"] == device else ():
            taken = part["seconds"]
            pipe = next(name for name in taken if name not in ("bytes", "waits"))
            times = [
                f"{1e6 * taken['bytes']:.0f}",
                f"{1e6 * taken[pipe]:,.0f} ({pipe})",
                f"{1e6 * taken['waits']:,.0f}",
            ]
            moved = f"{part['bytes'] / 1e6:.0f} MB"
            yield [
                f"`{step['method']}`",
                part["kernel"],
                part["launches"],
                moved,
                f"{part['instructions']:.1f}",
                *times,
            ]


def operation_rows(run: Run) -> Iterator[list[object]]:
    """Yields a row for each method: its operations, those with the most bytes first, and their total."""
    for method in METHODS:
        own = run["launched"][CAPABILITY][method]["torch"]
        most = sorted(own.items(), key=lambda item: (-item[1]["bytes"], item[0]))
        named = ", ".join(
            f"{name.strip('_')} {one['launches']} x ({one['bytes'] / 1e6:.0f} MB)"
            for name, one in most
            if one["bytes"] >= 1e6
        )
        few = sum(one["launches"] for one in own.values() if one["bytes"] < 1e6)
        products = sum(one["products"] for one in own.values())
        total = f"{sum(one['bytes'] for one in own.values()) / 1e6:,.0f} MB"
        yield [f"`{method}`", f"{named}; {few} of less than 1 MB", total, f"{products / 1e9:.1f} G" if products else ""]


def _inside(run: Run, capability: str) -> Mapping[str, float]:
    """Returns the clocks of a turn of the kernel of ZipCache's probes, by pipe."""
    launches = run["launched"][capability]["zipcache"]["ours"]
    name = next(group["kernel"] for group in launches if group["kernel"].startswith("column_sums"))
    found: Mapping[str, float] = run["kernels"][f"{name} for sm_{capability}"]["parts"]["inside"]["busy"]
    return found


def section(run: Run, of: Sequence[Run], nodes: Sequence[float]) -> str:
    """Returns the section; `of` are measured runs, `nodes` the least and most seconds of a launch."""
    device, peaks = "H200", {own.capability: own for own in DEVICES.values()}.values()
    steps = {(step["method"], step["device"]): step for step in run["steps"]}
    zipcache, mikv, kivi = (steps[method, device] for method in ("zipcache", "mikv", "kivi"))
    launched = run["launched"][CAPABILITY]["zipcache"]
    inside, inside_80 = (_inside(run, of) for of in (CAPABILITY, "80"))
    head = [
        "method",
        "GPU",
        "prefill, a layer",
        "probes, us",
        "encoding, us",
        "torch, us",
        "launches",
        "work",
        "share",
        "beside",
    ]
    parts = ["method", "kernel", "launches", "bytes", "a value", "bytes, us", "busy, us", "waits, us"]
    text = SHARES.format(node=" ... ".join(f"{1e6 * seconds:g}" for seconds in nodes))
    text += table([*head, "accept", "stretch", "measured"], share_rows(run, of))
    text += BASELINE.format(dense=" and ".join(f"{2e-12 * dense(own):,.0f}" for own in peaks))
    text += table(
        ["GPU", "projections, ms", "MLP, ms", "attention, ms"],
        ([name, *(f"{1e3 * seconds:.1f}" for seconds in own.values())] for name, own in run["baseline"].items()),
    )
    text += PARTS.format(device=device) + table(parts, part_rows(run, device))
    text += OPERATIONS + table(["method", "operations", "together", "products"], operation_rows(run))
    pairs = REAL.heads * REAL.prompt * (REAL.prompt + 1) // 2
    measured_channels = [group for group in launched["ours"] if group["kernel"].startswith(EXTREMES)]
    scored = next(group for group in launched["ours"] if group["kernel"].startswith("column_sums"))
    return text + SAID.format(
        device=device,
        probes=100 * zipcache["probes"] / zipcache["prefill"],
        rows=scored["elements"] / pairs,
        mikv=50 * run["baseline"][device]["attention"] / mikv["prefill"],
        special=inside["special"],
        issue=inside["issue"],
        matrix=inside["matrix"],
        memory=inside_80["memory"],
        matrix_80=inside_80["matrix"],
        launches=zipcache["launches"],
        nodes=100 * zipcache["launches"] * nodes[1] / zipcache["prefill"],
        encoded=sum(part["launches"] for part in zipcache["parts"] if "bits" in part["kernel"]),
        klt=sum(one["bytes"] for one in run["launched"][CAPABILITY]["klt"]["torch"].values()) / 1e6,
        project=100 * steps["klt", device]["encoding"] / steps["klt", device]["prefill"],
        ranges=1
        + sum(len(group["grids"]) for group in measured_channels),  # keys' by torch, and values' once more from parts
        range_bytes=(launched["torch"]["aminmax"]["bytes"] + sum(group["bytes"] for group in measured_channels)) / 1e6,
        waits=zipcache["waits"],
        waits_kivi=kivi["waits"],
        stretch=1e6 * 0.04 * zipcache["prefill"],
        kivi=100 * kivi["share_beside"],
        kivi_share=100 * kivi["share"][1],
        zipcache=100 * zipcache["share_beside"],
        zipcache_share=100 * zipcache["share"][1],
        cache=sum(group["cache"] for group in launched["ours"]) / 1e9,
        cache_of_attention=pairs / 128 * 2 * REAL.head_dim * 2 / 1e9,
    )
