"""What codes as float16 numbers lose in matrix instructions that cut sums off: scores and mixtures beside the same with exact sums.
Writes benchmarks/results/cut_sums.json.

    PYTHONPATH=. python benchmarks/cut_sums.py [--write]

A matrix instruction is simulated as experiments describe NVIDIA's (Fasi et al., PeerJ Computer Science 7:e330): sixteen products
and what is there are cut off 23 bits below the largest exponent, and added. The worst is assumed of numbers below the least
normal one: that they count with its exponent. Codes are multiples of 2^-24, as `kernels/attend/unpack.py` makes them, have a
bias of 64, or are themselves; in units of a code, root mean square. *rounding* is what float16 takes of the query or of weights.
"""

import argparse

import numpy as np
from protocol import keep

BITS, CHANNELS, TOKENS, TIMES, TURN = (4, 2, 1), 128, 1280, 100, 16
CUT = 23
BIAS, LEAST, NORMAL = 64.0, 2.0**-24, -14  # the last: the exponent of the least normal number
FORMS = ("multiples", "biased", "themselves")


def exponent(x: np.ndarray) -> np.ndarray:
    """Of numbers; far below all of 0."""
    return np.where(x == 0, -999, np.frexp(x)[1] - 1)


def cut_sum(codes: np.ndarray, factors: np.ndarray, form: str) -> float:
    """Codes times factors in turns of such instructions, in units of a code."""
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
    """Of scores of `count` channels, or of mixtures of so many tokens by `weights`, which fall off as e^(2 n), n normal."""
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
    """Prints, and writes where it is asked to."""
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
