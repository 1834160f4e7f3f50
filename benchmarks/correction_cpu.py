"""Times GEAR's corrections when a segment is encoded on the CPU, measured at run time against calibrated ones.

    python -m benchmarks.correction_cpu [--tokens 1024] [--write]

One process, two threads, one segment of 8 KV heads of 128 channels, float32, 4 bits, outliers 2 %, rank 4. Data: normal with
outlier channels, outlier tokens and a low-rank part, new in every turn. All steps are timed in every turn, in another order each
turn; results are medians and quartiles of the ratios within turns, beside an A/A pair.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.protocol import keep, show, turn_by_turn
from calib.runtime.stages.codec import Corrected, UniformQuant
from calib.runtime.stages.correction import LowRank, Outliers

RESULT = "correction_cpu.json"
HEADS, CHANNELS, BITS, SHARE, RANK = 8, 128, 4, 0.02, 4

# Pairs of steps: the first is divided by the second.
RATIOS = {
    "A/A": ("quantise and rank again", "quantise and rank"),
    "power iteration / (quantise + rank outliers)": ("power iteration", "quantise and rank"),
    "ranked / calibrated outliers": ("ranked outliers", "calibrated outliers"),
    "iterated / calibrated low rank": ("power iteration", "calibrated basis"),
    "corrections in all, run-time / calibrated": ("corrections", "calibrated corrections"),
    "segment in all, run-time / calibrated": ("segment", "calibrated segment"),
    "segment in all / quantise alone": ("segment", "quantise"),
}


def tokens(count: int, seed: int) -> Tensor:
    """Returns random tokens `[1, HEADS, count, CHANNELS]`."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, HEADS, count, CHANNELS, generator=draw)
    x = x + torch.randn(1, HEADS, count, 3, generator=draw) @ torch.randn(1, HEADS, 3, CHANNELS, generator=draw)
    x[..., torch.randperm(CHANNELS, generator=draw)[:4]] *= 8
    x[..., torch.randperm(count, generator=draw)[: max(1, count // 100)], :] *= 4
    return x


def stages(role: str, sample: Tensor) -> dict[str, Corrected]:
    """Returns the released GEAR's codec of one stream with run-time and with calibrated corrections; these are from `sample`."""
    keys = role == "keys"
    codec = UniformQuant(BITS, (None, 1)) if keys else UniformQuant(BITS, (1, None), across_heads=True)
    ranked = Outliers(SHARE, "tokens" if keys else "channels", across_heads=not keys)
    flat = sample[0].transpose(0, 1).flatten(1) if keys else sample.flatten()[:, None]
    low, high = (flat.sort(0).values[round(end * (len(flat) - 1))] for end in (SHARE / 2, 1 - SHARE / 2))
    ends = [end.view(HEADS, 1, CHANNELS) if keys else end.view(1, 1, 1) for end in (low, high)]
    known = Outliers(SHARE, ranked.ranked, ranked.across_heads, "mean", *ends)
    basis = torch.linalg.svd(sample[0] - codec.decode(codec.encode(sample), CHANNELS)[0]).Vh[:, :RANK]
    return {
        "run-time": Corrected(codec, ranked, LowRank(RANK)),
        "calibrated": Corrected(codec, known, LowRank(RANK, basis=basis.contiguous())),
    }


def steps(codecs: dict[str, Corrected], x: Tensor) -> dict[str, Callable[[], object]]:
    """Returns the timed steps, on the segment `x`."""
    measured, known = codecs["run-time"], codecs["calibrated"]
    assert measured.outliers and measured.low_rank and known.outliers and known.low_rank
    residual = x - measured.codec.decode(measured.codec.encode(x), CHANNELS)

    def corrections(codec: Corrected) -> None:
        assert codec.outliers and codec.low_rank
        codec.outliers.find(x)
        codec.low_rank.encode(residual, False)

    def quantise_and_rank() -> None:
        measured.codec.encode(x, False)
        measured.outliers.find(x)  # type: ignore[union-attr]

    return {
        "quantise": lambda: measured.codec.encode(x, False),
        "quantise and rank": quantise_and_rank,
        "quantise and rank again": quantise_and_rank,
        "ranked outliers": lambda: measured.outliers.find(x),  # type: ignore[union-attr]
        "calibrated outliers": lambda: known.outliers.find(x),  # type: ignore[union-attr]
        "power iteration": lambda: measured.low_rank.encode(residual, False),  # type: ignore[union-attr]
        "calibrated basis": lambda: known.low_rank.encode(residual, False),  # type: ignore[union-attr]
        "corrections": lambda: corrections(measured),
        "calibrated corrections": lambda: corrections(known),
        "segment": lambda: measured.encode(x, False),
        "calibrated segment": lambda: known.encode(x, False),
    }


@torch.no_grad()
def measure(role: str, count: int, turns: int) -> dict[str, object]:
    """Returns the milliseconds of every step, and the ratios."""
    codecs = stages(role, tokens(4 * count, 1))
    return turn_by_turn(lambda turn: steps(codecs, tokens(count, 3 + turn)), turns, RATIOS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    found = {role: measure(role, asked.tokens, asked.turns) for role in ("keys", "values")}
    for role, run in found.items():
        show(run, f"{role:<7} ")
    if asked.write:
        keep(RESULT, {"tokens": asked.tokens, "kv_heads": HEADS, "head_dim": CHANNELS, **found})
