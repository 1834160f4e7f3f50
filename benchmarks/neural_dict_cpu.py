"""Times a training step of NeuralDict on the CPU against the same step in plain autograd.

    python -m benchmarks.neural_dict_cpu [--write]

One process, two threads; B = 512 vectors of 128 channels, N = 4096 atoms, s = 8 pairs, float32: codes, both losses, their
gradients, Adam, ReNorm. Data: sums of shared directions with noise and outlier channels, new in every turn. All steps are timed in
every turn, in another order each turn; results are medians and quartiles of the ratios within turns, beside an A/A pair.

`autograd` differentiates through matching pursuit and forms I - W W^T of N x N; `autograd, codes known` takes the codes of our
pursuit as constants, and autograd for the rest. Times are measured only after the losses of all were found to agree.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.autograd_step import AGREE, AutogradStep, ours
from benchmarks.protocol import Steps, keep, show, turn_by_turn
from calib.kernels.matching_pursuit.reference import matching_pursuit
from calib.neural_dict.centroids import unit_rows

RESULT = "neural_dict_cpu.json"
CHANNELS, BATCH = 128, 512

# Pairs of steps: the first is divided by the second.
RATIOS = {
    "A/A": ("ours again", "ours"),
    "autograd / ours": ("autograd", "ours"),
    "autograd, codes known / ours": ("autograd, codes known", "ours"),
    "ours / its matching pursuit": ("ours", "matching pursuit"),
}


def vectors(count: int, seed: int) -> Tensor:
    """Returns random vectors `[count, CHANNELS]`."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(64, CHANNELS, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, 64, generator=draw).relu() @ shared / 8 + 0.3 * torch.randn(count, CHANNELS, generator=draw)
    x[:, :3] *= 6
    return x


def measure(count: int, sparsity: int, turns: int) -> dict[str, object]:
    """Returns the milliseconds of every step, and the ratios."""
    atoms = unit_rows(vectors(count, 3))
    plain, known = (AutogradStep(atoms, sparsity, known) for known in (False, True))
    first, second = ours(atoms, sparsity), ours(atoms, sparsity)
    x = vectors(BATCH, 4)
    expected = plain.step(x)
    first.train_batch(x)
    for found in (first.last_losses, known.step(x)):
        torch.testing.assert_close(found, expected, rtol=AGREE, atol=0)
    steps: dict[str, Callable[[Tensor], object]] = {
        "autograd": plain.step,
        "autograd, codes known": known.step,
        "ours": first.train_batch,
        "ours again": second.train_batch,
        "matching pursuit": lambda x: matching_pursuit(x, first.atoms, sparsity),
    }

    def of_turn(turn: int) -> Steps:
        x = vectors(BATCH, 5 + turn)
        return {name: partial(step, x) for name, step in steps.items()}

    return turn_by_turn(of_turn, turns, RATIOS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, default=4096)
    parser.add_argument("--sparsity", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"keep the run in benchmarks/results/{RESULT}")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    run = measure(asked.atoms, asked.sparsity, asked.turns)
    show(run)
    if asked.write:
        sizes = {"vectors": BATCH, "channels": CHANNELS, "atoms": asked.atoms, "sparsity": asked.sparsity}
        keep(RESULT, {**sizes, **run})
