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

What a method adds to the prefill of a prompt of 32,768 tokens, for one sequence and one layer of the 8B shape. *probes*: the
kernel that sums attention probabilities over query rows (`column_sums`). *encoding*: all other kernels of ours. *torch*:
operations of torch, from the bytes that they move at the rate of a copy. *share without launches*: these three over the time of
the prefill without compression. *share*: the same with the cost of all launches, {node} us each. *on a side stream*: what would
be left of the share if this work ran on a side stream, see below.

"""

BASELINE = """
For the prefill without compression the shortest possible time is assumed, which makes every share as large as it can be: its
matrix products at the peak rate of the data sheet ({dense} TFLOP/s at the clocks below), one after the other, and
nothing else. Our kernels are assumed to reach their limits, too. If both reach the same fraction of their limits, the share does
not change.

"""

PARTS = """
### Prefill kernels: time by each limit

Microseconds of all launches of a kernel in a layer by each limit, on an {device}; the limits are those of the [attention
kernels](#attention-kernels-time-by-each-limit). *instructions a value*: instructions of all lanes, divided by the number of
values encoded or copied, logits of the probes, or scores. "no. 2" is the same kernel compiled for other arguments.

"""

OPERATIONS = """
### Torch operations of a prefill

The operations of a layer besides our kernels, with the number of their launches and the bytes that they must read and write at
least; *products* are multiply-adds in float64.

"""

SAID = """
### Where the time goes, and what would reduce it

- **ZipCache's probes** take {probes:.1f} % of the prefill on an {device}: one pass over {rows:.1%} of the pairs of query and
  key that attention computes, with half of attention's products. The sums of its rows are those of attention itself, which
  torch's flash and cuDNN backends return (`runtime/attend/prompt_attention.py`); with another backend a separate pass, as long
  as this one, computes them.
- **MiKV scores with every row of the prompt.** Its pass has half of the products of attention itself, which no kernel can
  compute in less than {mikv:.0f} % of the prefill. With `probes="random+recent"` it uses the same probes as ZipCache.
- **Little can be saved within a pass** on an H100: exponentials ({special} clocks of a scheduler for a warp's iteration),
  instruction issue ({issue}) and matrix products ({matrix}) take nearly the same time. On an A100 the products' operands are
  loaded from shared memory ({memory} clocks, and {matrix_80} for the products, with tiles of 256 keys).
- **Ranges of channels** are measured {ranges} times in a layer with ZipCache, which moves {range_bytes:.0f} MB: for the keys of
  each tier and for all values (`kernels/channel_ranges`), and for all keys. The last two also show whether the parameters of
  values and keys fit in 16 bits.
- **Copying** words and parameters into pages takes one launch for each tier (`kernels/put_tokens`).
- **Launches**: ZipCache has {launches}, which take {nodes:.1f} % at the higher cost of a launch. What the host computes without
  the device is no launch, and neither is an operation with an empty result. A codec that has a kernel encodes a tier at once
  ({encoded} launches for the keys and values of both tiers); a codec without one encodes pieces of 4,096 tokens, to limit its
  memory in float32.
- **`klt`** undoes RoPE in a prompt's keys in one launch (`kernels/unrotate`), and encodes every piece of 4,096 tokens in one
  launch for keys and one for values, which computes components, codes and words. Its kernels take {project:.1f} % of the
  prefill, and torch's operations move {klt:,.0f} MB in a layer.
- **The host waits** until the device has finished all queued work {waits} times in a layer with ZipCache and {waits_kivi} times
  with KIVI. After such a wait the device is idle until the host has queued new work, which no count shows; 4 % of a layer's
  prefill are {stretch:.0f} us. Whether parameters fit in 16 bits follows from the minimum and maximum of the first tokens that
  a layer gets. Both are sent to the host before the prompt's attention is queued, and the host reads them afterwards: so the
  device computes attention while the host prepares the encoding.

### What a side stream could hide

A prefill is limited by matrix products, and the memory's bandwidth is nearly unused. On a side stream, work that is limited by
bytes can run at the same time, and so can the gaps between launches; work that issues instructions competes with the prefill.
So at most the time for which our programs occupy schedulers and pipes is left of the share (column *on a side stream*). For
KIVI that is {kivi:.1f} % of {kivi_share:.1f} %; for ZipCache it is {zipcache:.1f} % of {zipcache_share:.1f} %, because its
probes are limited by arithmetic, which no stream hides.

### What the prefill's prediction leaves out

- The L2 cache: every program of the probes' kernel reads the same tiles from it again, {cache:.0f} GB in a layer with ZipCache,
  where attention reads {cache_of_attention:.0f} GB with tiles of 128 query rows. No data sheet states its rate.
- Sorting: there is none, because `kernels/top_k` divides a prompt's tokens among the tiers in one launch. Torch sorts fewer
  than 128 rows one after the other, in several launches each, which a count of operations does not show.
- Norms, RoPE, residual additions and the copy that `DynamicCache` makes: they would lengthen the prefill without compression.
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
            f"{one['launches']} x {name.strip('_')} ({one['bytes'] / 1e6:.0f} MB)"
            for name, one in most
            if one["bytes"] >= 1e6
        )
        few = sum(one["launches"] for one in own.values() if one["bytes"] < 1e6)
        products = sum(one["products"] for one in own.values())
        total = f"{sum(one['bytes'] for one in own.values()) / 1e6:,.0f} MB"
        yield [
            f"`{method}`",
            f"{named}; {few} launches of less than 1 MB",
            total,
            f"{products / 1e9:.1f} G" if products else "",
        ]


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
        "prefill of a layer",
        "probes, us",
        "encoding, us",
        "torch, us",
        "launches",
        "share without launches",
        "share",
        "on a side stream",
    ]
    parts = ["method", "kernel", "launches", "bytes", "instructions a value", "bytes, us", "busy, us", "waits, us"]
    text = SHARES.format(node=" ... ".join(f"{1e6 * seconds:g}" for seconds in nodes))
    text += table([*head, "accept", "stretch", "measured"], share_rows(run, of))
    text += BASELINE.format(dense=" and ".join(f"{2e-12 * dense(own):,.0f}" for own in peaks))
    text += table(
        ["GPU", "projections, ms", "MLP, ms", "attention, ms"],
        ([name, *(f"{1e3 * seconds:.1f}" for seconds in own.values())] for name, own in run["baseline"].items()),
    )
    text += PARTS.format(device=device) + table(parts, part_rows(run, device))
    text += OPERATIONS + table(["method", "operations", "bytes", "products"], operation_rows(run))
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
