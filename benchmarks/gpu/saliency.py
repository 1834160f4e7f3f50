"""Times the saliency scores of ZipCache's probe rows of a prompt against the flash forward over the same prompt."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.agreement import OUTPUT, agree, kernels
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.inputs import queries
from benchmarks.gpu.launches import supported
from benchmarks.gpu.layers import Heads, prompt_of
from benchmarks.gpu.operations import attention_mass
from benchmarks.gpu.sdpa import fastest_causal
from benchmarks.gpu.turns import in_turns
from calib.runtime.attend.prompt_attention import prompt_normalised
from calib.runtime.attend.request import QKV, AttendRequest
from calib.runtime.logits import Logits

SHARE = 0.1
CHECKED = 128  # probe rows whose scores are compared with plain torch, which is slow


@torch.no_grad()
def probes(bench: Bench) -> Measured:
    """Returns the figure "share of flash": the time for a tenth of the rows, half of them the newest, over the causal forward.

    The rows' normalisers are given, if the prefill's attention returns them.
    """
    bench.needs_kernel("probe_saliency")
    size = bench.sizes
    heads = Heads(1, size.heads, size.kv_heads, size.head_dim)
    positions, scale, sets, sums = probe_rows(size.prompt), size.head_dim**-0.5, [], []
    for seed in range(size.host_sets):
        keys, values = prompt_of(bench, heads, seed, size.prompt)
        sets.append(QKV(queries(keys, size.heads, size.prompt, seed), keys, values))
        found = prompt_normalised(AttendRequest(None, range(1), Logits(scale), sets[-1]))[1]
        sums.append(None if found is None else found[:, :, positions])
    launched, apart = checked(bench, sets[0], positions, scale, sums[0])
    name, attention, known = fastest_causal(bench, *sets[0])

    def score() -> None:
        for (query, keys, _), normalisers in zip(sets, sums, strict=True):
            attention_mass(query[:, :, positions], keys, positions, scale, normalisers=normalisers)

    def attend() -> None:
        for given in sets:
            attention(*given)

    calls: dict[str, Callable[[], object]] = {"probes": score, "probes again": score, "flash": attend}
    timed = in_turns(bench, calls, {"share": ("probes", "flash"), "A/A": ("probes again", "probes")})
    details = {
        "probes": len(positions),
        "baseline": name,
        "baselines_milliseconds": known,
        "distance_to_reference": apart,
        "sums_given": all(one is not None for one in sums),
    }
    return Measured({"share of flash": timed["ratios"]["share"]}, {**details, "kernels_launched": launched, **timed})


def probe_rows(count: int) -> Tensor:
    """Returns the probe rows: half the newest rows, half evenly spaced among the others; int64 on the host, increasing."""
    half = max(1, int(count * SHARE / 2))
    earlier = torch.linspace(0, count - half - 1, half).round().long().unique()
    return torch.cat([earlier, torch.arange(count - half, count)])


def checked(bench: Bench, given: QKV, positions: Tensor, scale: float, sums: Tensor | None) -> tuple[list[str], float]:
    """Compares the attention mass of some rows, with the given normalisers `sums`, with plain torch, which recomputes them."""
    step = max(1, len(positions) // CHECKED)
    some = positions[::step]
    score = partial(attention_mass, given.query[:, :, some], given.keys, some, scale)
    with kernels("reference"):
        expected = score()
    with supported(bench, "probe_saliency") as launched:
        found = score(normalisers=None if sums is None else sums[:, :, ::step])
    return sorted(launched), agree("attention mass", found, expected, OUTPUT)
