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

from benchmarks.protocol import Steps, keep, show, turn_by_turn
from calib.kernels.matching_pursuit.reference import matching_pursuit
from calib.neural_dict.centroids import unit_rows
from calib.neural_dict.dictionary import NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions

RESULT = "neural_dict_cpu.json"
CHANNELS, BATCH = 128, 512
AGREE = 1e-3  # largest relative difference of the losses; another choice of an atom in a near tie changes them by less

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


class Autograd:
    """The step as in CSR's eq. 8 to 11, with atoms `[N, CHANNELS]` differentiated by torch."""

    def __init__(self, atoms: Tensor, options: DictionaryOptions, known: bool) -> None:
        self.atoms, self.known = atoms.clone().requires_grad_(), known
        self.adam = torch.optim.Adam([self.atoms], lr=options.learning_rate)
        self.eye, self.before = torch.eye(len(atoms)), None

    def residual(self, x: Tensor, sparsity: int) -> Tensor:
        """Returns x - x^, differentiable through the pursuit, or with its codes as constants."""
        if self.known:
            index, coefficient = matching_pursuit(x, self.atoms, sparsity)
            return x - (coefficient[..., None] * self.atoms[index]).sum(1)
        for _ in range(sparsity):
            products = x @ self.atoms.T
            position = products.abs().argmax(1)
            x = x - products.gather(1, position[:, None]) * self.atoms[position]
        return x

    def step(self, x: Tensor, sparsity: int) -> Tensor:
        """Takes one step; returns both losses, `[2]`."""
        mse = self.residual(x, sparsity).square().sum(1).mean()
        penalty = (self.eye - self.atoms @ self.atoms.T).square().sum() / len(self.atoms) ** 2
        losses = torch.stack([mse, penalty]).detach()
        before = losses if self.before is None else self.before
        self.before = losses
        self.adam.zero_grad()
        (mse + torch.clamp(0.1 * before[0] / before[1], max=1) * penalty).backward()
        self.adam.step()
        with torch.no_grad():
            self.atoms /= self.atoms.norm(dim=1, keepdim=True)
        return losses


def ours(atoms: Tensor, sparsity: int) -> NeuralDictionary:
    """Returns calib's dictionary, starting from the same atoms."""
    task = Task("keys.0", vectors(len(atoms), 1), vectors(8, 2), len(atoms), sparsity)
    dictionary = NeuralDictionary(task, DictionaryOptions(), 0)
    dictionary.losses.zero_()  # finite losses, so that `begin` computes no centroids
    with torch.no_grad():
        dictionary.atoms.copy_(atoms)
    dictionary.begin()
    dictionary.begin_epoch()
    return dictionary


def measure(count: int, sparsity: int, turns: int) -> dict[str, object]:
    """Returns the milliseconds of every step, and the ratios."""
    atoms = unit_rows(vectors(count, 3))
    plain, known = (Autograd(atoms, DictionaryOptions(), known) for known in (False, True))
    first, second = ours(atoms, sparsity), ours(atoms, sparsity)
    x = vectors(BATCH, 4)
    expected = plain.step(x, sparsity)
    first.train_batch(x)
    for found in (first.last_losses, known.step(x, sparsity)):
        torch.testing.assert_close(found, expected, rtol=AGREE, atol=0)
    steps: dict[str, Callable[[Tensor], object]] = {
        "autograd": lambda x: plain.step(x, sparsity),
        "autograd, codes known": lambda x: known.step(x, sparsity),
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
