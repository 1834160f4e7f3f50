"""A training step of NeuralDict in plain autograd, and ours from the same atoms: what the benchmarks of it compare."""

import torch
from torch import Tensor

from calib.kernels.matching_pursuit.reference import matching_pursuit
from calib.neural_dict.dictionary import NeuralDictionary, Task
from calib.neural_dict.options import DictionaryOptions

AGREE = 1e-3  # largest relative difference of the losses; another choice of an atom in a near tie changes them by less


class AutogradStep:
    """The step as in CSR's eq. 8 to 11: autograd through matching pursuit, I - W W^T formed explicitly, Adam, ReNorm.

    `known`: the codes of our pursuit are constants, and autograd is for the rest.
    """

    def __init__(self, atoms: Tensor, sparsity: int, known: bool = False) -> None:
        self.atoms, self.sparsity, self.known = atoms.clone().requires_grad_(), sparsity, known
        self.adam = torch.optim.Adam([self.atoms], lr=DictionaryOptions().learning_rate)
        self.eye = torch.eye(len(atoms), device=atoms.device)
        self.before: Tensor | None = None

    def residual(self, x: Tensor) -> Tensor:
        """Returns x - x^, differentiable through the pursuit, or with its codes as constants."""
        if self.known:
            index, coefficient = matching_pursuit(x, self.atoms, self.sparsity)
            return x - (coefficient[..., None] * self.atoms[index]).sum(1)
        for _ in range(self.sparsity):
            products = x @ self.atoms.T
            position = products.abs().argmax(1)
            x = x - products.gather(1, position[:, None]) * self.atoms[position]
        return x

    def step(self, x: Tensor) -> Tensor:
        """Takes one step; returns both losses, `[2]`."""
        mse = self.residual(x).square().sum(1).mean()
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
    """Returns calib's dictionary, which begins with these atoms; they stand for its samples, of which only the number counts."""
    dictionary = NeuralDictionary(Task("keys.0", atoms, atoms[:8], len(atoms), sparsity), DictionaryOptions(), 0)
    dictionary.to(atoms.device)
    dictionary.losses.zero_()  # finite losses, so that `begin` computes no centroids
    with torch.no_grad():
        dictionary.atoms.copy_(atoms)
    dictionary.begin()
    dictionary.begin_epoch()
    return dictionary
