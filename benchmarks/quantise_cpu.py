"""Times quantising and packing keys and values on the CPU: our codecs against quanto and hqq, called as QuantizedCache does.

    python -m benchmarks.quantise_cpu [--tokens 2048] [--turns 15] [--threads 2] [--write]

One process, float32, one layer's keys and values `[1, 8, tokens, 128]`. Ours are the codecs of `kivi` (keys in groups of 32 tokens
of a channel, values in groups of 32 channels of a token) and, to compare equal groups, the values' codec for both; from float
tokens to packed words and 16-bit parameters, in pieces as in a store. quanto runs its MaxOptimizer and `quantize_weight`, hqq its
`Quantizer.quantize`, with transformers' arguments and groups of 32. `clone` copies the same tokens: the cost of memory alone. Data:
normal with outlier channels and tokens, new in every turn. Every side also decodes what it encoded, and its error is recorded
beside its time. All steps are timed in every turn, in another order each turn; results are medians and quartiles of the ratios
within turns, beside an A/A pair. hqq optimises for a second or more, so it has a third of the turns, separate from the others.
"""

import argparse
from collections.abc import Callable

import torch
from hqq.core.quantize import Quantizer
from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight
from torch import Tensor

from benchmarks.protocol import keep, show, turn_by_turn
from calib.runtime.stages.codec import UniformQuant
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.transform import Identity

RESULT = "quantise_cpu.json"
HEADS, CHANNELS, GROUP = 8, 128, 32
BLOCK = 128  # tokens of a block, which decode steps encode together; more tokens count as a prompt
WORST = 2.0  # largest ratio of two sides' errors; beyond it they do not solve the same task

# Pairs of steps: the first is divided by the second.
RATIOS = {
    "A/A": ("kivi again", "kivi"),
    "quanto / kivi": ("quanto", "kivi"),
    "quanto / by token": ("quanto", "by token"),
    "kivi / clone": ("kivi", "clone"),
}
RATIOS_OF_HQQ = {"hqq / kivi": ("hqq", "kivi"), "hqq / by token": ("hqq", "by token")}

Pair = tuple[Tensor, Tensor]


def tokens(count: int, seed: int) -> Pair:
    """Returns random keys and values `[1, HEADS, count, CHANNELS]`."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, HEADS, count, CHANNELS, generator=draw) for _ in range(2))
    keys[..., 3::40] *= 8
    values[:, :, ::100] *= 4
    return keys, values


def encoders(bits: int) -> dict[str, tuple[Callable[[Tensor], object], ...]]:
    """Returns for each side the functions that encode keys and values."""

    def ours(group: tuple[int, int]) -> Callable[[Tensor], object]:
        codec = UniformQuant(bits, group)
        # Whether parameters need 32 bits is determined for a prompt only; later blocks use the prompt's result.
        return lambda x: encoded(Identity(), codec, x, x.shape[2] > BLOCK and codec.fp32_params(x))

    by_channel, by_token = ours((GROUP, 1)), ours((1, GROUP))
    kind, optimizer = {4: qint4, 2: qint2}[bits], MaxOptimizer()

    def quanto(x: Tensor) -> Tensor:
        scale, zero = optimizer(x, kind, 0, GROUP)
        return quantize_weight(x, kind, 0, scale, zero, GROUP)

    def hqq(x: Tensor) -> object:
        return Quantizer.quantize(x, axis=0, device="cpu", compute_dtype=x.dtype, nbits=bits, group_size=GROUP)

    return {
        "kivi": (by_channel, by_token),
        "kivi again": (by_channel, by_token),
        "by token": (by_token, by_token),
        "quanto": (quanto, quanto),
        "hqq": (hqq, hqq),
        "clone": (torch.clone, torch.clone),
    }


def errors(bits: int, pair: Pair) -> dict[str, list[float]]:
    """Returns each side's relative errors of keys and values after decoding; exits if those of values differ too much."""
    found = {}
    for name, encode in encoders(bits).items():
        restored = []
        for role, x in enumerate(pair):
            held = encode[role](x)
            if isinstance(held, dict):
                group = (GROUP, 1) if name.startswith("kivi") and role == 0 else (1, GROUP)
                restored.append(UniformQuant(bits, group).decode(held, CHANNELS))
            elif isinstance(held, tuple):
                restored.append(Quantizer.dequantize(*held))
            else:
                restored.append(held.dequantize() if name == "quanto" else held)  # type: ignore[attr-defined]
        found[name] = [float((x - y).norm() / x.norm()) for x, y in zip(pair, restored, strict=True)]
    for name in ("quanto", "hqq", "kivi"):
        # Groups of values are (nearly) the same: a much smaller error means an easier task, a much larger one a wrong use.
        if not 1 / WORST < found[name][1] / found["by token"][1] < WORST:
            raise SystemExit(f"{name} errs by {found[name][1]:.4f} on values, ours by {found['by token'][1]:.4f}")
    return found


@torch.no_grad()
def measure(count: int, bits: int, turns: int) -> dict[str, object]:
    """Returns the relative errors, the milliseconds of every step, and the ratios."""

    def run(turns: int, ratios: dict[str, tuple[str, str]]) -> dict[str, dict[str, list[float]]]:
        names = {name for pair in ratios.values() for name in pair}

        def of(turn: int) -> dict[str, Callable[[], object]]:
            keys, values = tokens(count, 1 + turn)
            chosen = {name: encode for name, encode in encoders(bits).items() if name in names}
            return {name: lambda encode=encode: (encode[0](keys), encode[1](values)) for name, encode in chosen.items()}

        return turn_by_turn(of, turns, ratios)

    relative = errors(bits, tokens(count, 0))
    runs = run(turns, RATIOS), run(max(3, turns // 3), RATIOS_OF_HQQ)
    both = {part: {**runs[1][part], **runs[0][part]} for part in runs[0]}
    return {"relative_error": relative, **both}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 2048, 16384])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = []
    for count in asked.tokens:
        for bits in asked.bits:
            run = measure(count, bits, asked.turns)
            rows.append({"tokens": count, "bits": bits, **run})
            show(run, f"{count} tokens, {bits} bit: ")
    if asked.write:
        keep(RESULT, {"kv_heads": HEADS, "head_dim": CHANNELS, "group": GROUP, "turns": asked.turns, "rows": rows})
