"""Times a training step of NeuralDict against the same step in plain autograd (on a CPU: `benchmarks/neural_dict_cpu.py`)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.gpu.agreement import Disagrees
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.inputs import vectors
from benchmarks.gpu.launches import supported
from benchmarks.gpu.turns import in_turns
from calib.neural_dict.dictionary import NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions

AGREE = 1e-3  # largest relative difference of the losses; another choice of an atom in a near tie changes them by less


class Autograd:
    """The step as in CSR's eq. 8 to 11: autograd through matching pursuit, I - W W^T formed explicitly, Adam, ReNorm."""

    def __init__(self, atoms: Tensor, sparsity: int, rate: float) -> None:
        self.atoms, self.sparsity = atoms.clone().requires_grad_(), sparsity
        self.adam = torch.optim.Adam([self.atoms], lr=rate)
        self.eye = torch.eye(len(atoms), device=atoms.device)
        self.before: Tensor | None = None

    def step(self, x: Tensor) -> Tensor:
        """Takes one step; returns both losses, `[2]`."""
        for _ in range(self.sparsity):
            products = x @ self.atoms.T
            position = products.abs().argmax(1)
            x = x - products.gather(1, position[:, None]) * self.atoms[position]
        mse = x.square().sum(1).mean()
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
    count, width = atoms.shape
    samples = vectors(count, width, 1, torch.device("cpu"))
    dictionary = NeuralDictionary(Task("keys.0", samples, samples[:8], count, sparsity), DictionaryOptions(), 0)
    dictionary.to(atoms.device)
    dictionary.losses.zero_()  # finite losses, so that `begin` computes no centroids
    with torch.no_grad():
        dictionary.atoms.copy_(atoms)
    dictionary.begin()
    dictionary.begin_epoch()
    return dictionary


def training_step(bench: Bench) -> Measured:
    """Returns the figure "speedup": autograd's time over ours."""
    bench.needs_kernel("matching_pursuit")
    size = bench.sizes
    width = min(size.head_dim, size.step_atoms)
    atoms = normalize(vectors(size.step_atoms, width, 3, bench.device))
    plain, first = Autograd(atoms, size.sparsity, DictionaryOptions().learning_rate), ours(atoms, size.sparsity)
    again = ours(atoms, size.sparsity)
    sets = [vectors(size.step_vectors, width, 4 + seed, bench.device) for seed in range(size.sets)]
    expected = plain.step(sets[0])
    with supported(bench, "matching_pursuit") as launched:
        first.train_batch(sets[0])
    apart = float(((first.last_losses - expected) / expected).abs().max())
    if not apart <= AGREE:
        raise Disagrees(f"the losses are {apart:.2g} away from autograd's (at most {AGREE:.2g}): no speed is given")

    def every(step: Callable[[Tensor], object]) -> None:
        for x in sets:
            step(x)

    calls: dict[str, Callable[[], object]] = {
        "ours": partial(every, first.train_batch),
        "ours again": partial(every, again.train_batch),
        "autograd": partial(every, plain.step),
    }
    timed = in_turns(bench, calls, {"speedup": ("autograd", "ours"), "A/A": ("ours again", "ours")})
    details: dict[str, object] = {
        "vectors": size.step_vectors,
        "atoms": size.step_atoms,
        "channels": width,
        "sparsity": size.sparsity,
    }
    details |= {"baseline": "autograd through the pursuit, float32", "losses_apart": apart}
    return Measured({"speedup": timed["ratios"]["speedup"]}, {**details, "kernels_launched": sorted(launched), **timed})
