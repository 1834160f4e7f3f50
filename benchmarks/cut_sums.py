"""Simulates the error of float16 codes in matrix instructions that truncate sums: scores and mixtures against exact sums.
Writes benchmarks/results/cut_sums.json.

    python -m benchmarks.cut_sums [--write]

The simulated matrix instruction is NVIDIA's as found by experiments (Fasi et al., PeerJ Computer Science 7:e330): sixteen products
and the accumulator are truncated 23 bits below the largest exponent, and added. For subnormal numbers the worst case is assumed:
that they count with the exponent of the least normal number. Codes are represented as multiples of 2^-24, as in
`kernels/attend/unpack.py`, with a bias of 64, or as themselves. Errors are root mean squares in units of a code. *rounding* is the
error by rounding the query or the weights to float16.
"""

import argparse

import numpy as np

from benchmarks.protocol import keep

BITS, CHANNELS, TOKENS, TIMES, TURN = (4, 2, 1), 128, 1280, 100, 16
CUT = 23
BIAS, LEAST, NORMAL = 64.0, 2.0**-24, -14  # the last: the exponent of the least normal number
FORMS = ("multiples", "biased", "themselves")


def exponent(x: np.ndarray) -> np.ndarray:
    """Returns the exponents of numbers; -999 for 0."""
    return np.where(x == 0, -999, np.frexp(x)[1] - 1)


def cut_sum(codes: np.ndarray, factors: np.ndarray, form: str) -> float:
    """Returns sum(codes * factors) as computed by these instructions, 16 products at a time, in units of a code."""
    numbers = {"multiples": codes * LEAST, "biased": codes + BIAS, "themselves": codes}[form]
    exponents = np.full(len(codes), NORMAL) if form == "multiples" else exponent(numbers)
    total = 0.0
    for at in range(0, len(codes), TURN):
        part = slice(at, at + TURN)
        products = numbers[part] * factors[part]
        largest = max((exponents[part] + exponent(factors[part])).max(), exponent(np.array(total)))
        step = 2.0 ** (largest - CUT)
        total = float(np.float32((np.trunc(products / step).sum() + np.trunc(total / step)) * step))
    return {"multiples": total / LEAST, "biased": total - BIAS * factors.sum(), "themselves": total}[form]


def lost(draw: np.random.Generator, bits: int, count: int, weights: bool) -> dict[str, float]:
    """Returns the errors of scores of `count` channels, or with `weights` of mixtures of `count` tokens.

    Weights are e^(2 n) with n normal, and errors of mixtures are relative to their sum.
    """
    found: dict[str, list[float]] = {"rounding": [], **{form: [] for form in FORMS}}
    for _ in range(TIMES):
        drawn = draw.standard_normal(count)
        factors = np.exp(2 * drawn) if weights else drawn
        factors /= np.abs(factors).max()
        codes, taken = draw.integers(0, 2**bits, count).astype(float), factors.astype(np.float16).astype(float)
        whole = factors.sum() if weights else 1.0
        found["rounding"].append((taken - factors) @ codes / whole)
        for form in FORMS:
            found[form].append((cut_sum(codes, taken, form) - taken @ codes) / whole)
    return {name: float(f"{np.sqrt(np.mean(np.square(own))):.2e}") for name, own in found.items()}


def main() -> None:
    """Prints the errors; with --write saves them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    asked, draw, content = parser.parse_args(), np.random.default_rng(0), dict[str, object]()
    for name, count in (("scores", CHANNELS), ("mixtures", TOKENS)):
        content[name] = {bits: lost(draw, bits, count, name == "mixtures") for bits in BITS}
        print(name, content[name], sep="  ")
    if asked.write:
        keep("cut_sums.json", {"cut": CUT, "channels": CHANNELS, "tokens": TOKENS, "times": TIMES, **content})


if __name__ == "__main__":
    main()
