"""One group's dictionary and the state of its training, all of which is saved in the checkpoint."""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from calib.documents.generators import keyed_random
from calib.kernels.matching_pursuit.operation import matching_pursuit
from calib.kernels.matching_pursuit.reference import desparsify
from calib.neural_dict.centroids import centroids, unit_rows
from calib.neural_dict.loss import diversity, diversity_weight, reconstruction
from calib.neural_dict.options import DictionaryOptions

FIGURES = ("loss", "diversity", "beta", "dead", "validation")
EPSILON = 1e-12  # of Adam: far below the gradients, also of a stream whose vectors are short
RESEED_VECTORS = 4096  # number of random samples among which the worst reconstructed are found


@dataclass(frozen=True, eq=False)
class Task:
    """A dictionary to be trained.

    Attributes:
        name: the stream and the group, such as `keys.0`.
        samples: training vectors, float32 `[V, d]` on the CPU, V at least `atoms`.
        heldout: validation vectors, float32 `[V', d]` on the CPU.
        atoms: rows of the dictionary.
        sparsity: (atom, coefficient) pairs of a vector, at most d.
    """

    name: str
    samples: Tensor
    heldout: Tensor
    atoms: int
    sparsity: int


class NeuralDictionary(nn.Module):
    """Algorithm 1 of CSR (arXiv:2412.11741) for one group: `atoms` float32 `[N, d]`, rows of length 1.

    An epoch reads the samples in an order that depends only on seed, name and epoch, not on other groups, processes or earlier
    draws, so the state after an epoch is all that a resumed training needs. Besides the atoms, it is Adam's moments, the losses
    of the last batch (for beta, eq. 11), the atoms with the best validation loss so far, which are the result (at first the
    centroids), and the figures of the last epoch.
    """

    first_moment: Tensor
    second_moment: Tensor
    last_losses: Tensor
    best: Tensor
    losses: Tensor
    epochs: Tensor
    figures: Tensor

    def __init__(self, task: Task, options: DictionaryOptions, seed: int) -> None:
        super().__init__()
        self.task, self.options, self.seed = task, options, seed
        empty = torch.zeros(task.atoms, task.samples.shape[1], dtype=torch.float32)
        self.atoms = nn.Parameter(empty.clone())
        for name in ("first_moment", "second_moment", "best"):
            self.register_buffer(name, empty.clone())
        self.register_buffer("last_losses", torch.zeros(2, dtype=torch.float32))  # L_MSE and L_div of the batch before
        self.register_buffer("losses", torch.full((2,), math.inf, dtype=torch.float64))  # validation: initial, best
        self.register_buffer("epochs", torch.zeros(2, dtype=torch.int64))  # finished; those when the best was found
        self.register_buffer("figures", torch.zeros(len(FIGURES), dtype=torch.float64))
        self.batches = math.ceil(len(task.samples) / options.batch_size)

    @property
    def stopped(self) -> bool:
        """Whether all epochs have run, or `patience` epochs without a better validation loss."""
        run, best = self.epochs.tolist()
        return run >= self.options.epochs or run - best >= self.options.patience

    def draw(self, purpose: str) -> Generator:
        """Returns a CPU generator for one purpose in the current epoch."""
        epoch = int(self.epochs[0])
        key = keyed_random("dictionary", self.seed, self.task.name, epoch, purpose)
        return Generator().manual_seed(key.getrandbits(63))

    @torch.no_grad()
    def begin(self) -> None:
        """Moves the samples to the atoms' device and creates the optimizer; starts from centroids unless resumed."""
        device = self.atoms.device
        self.samples, self.heldout = self.task.samples.to(device), self.task.heldout.to(device)
        if math.isinf(self.losses[0]):
            self.atoms.copy_(centroids(self.samples, self.task.atoms, self.draw("centroids")))
            self.losses.fill_(self.validation_loss())
            self.best.copy_(self.atoms)
        self.optimizer = torch.optim.Adam([self.atoms], eps=EPSILON)
        self.step = int(self.epochs[0]) * self.batches
        # Adam updates these buffers in place, so the checkpoint has its moments.
        self.optimizer.state[self.atoms] = {
            "step": torch.tensor(float(self.step), dtype=torch.float32),
            "exp_avg": self.first_moment,
            "exp_avg_sq": self.second_moment,
        }

    def end(self) -> None:
        """Frees the samples and the optimizer."""
        del self.samples, self.heldout, self.optimizer

    def begin_epoch(self) -> None:
        """Draws the order of the samples and resets counts and sums."""
        self.order = torch.randperm(len(self.samples), generator=self.draw("order")).to(self.samples.device)
        self.used = torch.zeros(len(self.atoms), dtype=torch.int64, device=self.order.device)
        self.summed = torch.zeros(2, dtype=torch.float32, device=self.order.device)

    def train_part(self, part: int, parts: int) -> None:
        """Trains on part number `part`, from 0, of `parts` equal parts of the epoch's batches."""
        if part == 0:
            self.begin_epoch()
        batches = self.order.tensor_split(self.batches)
        for number in range(part * self.batches // parts, (part + 1) * self.batches // parts):
            self.train_batch(self.samples[batches[number]])

    def train_batch(self, x: Tensor) -> None:
        """Takes one optimizer step on the batch `x [B, d]`."""
        index, coefficient = matching_pursuit(x, self.atoms, self.task.sparsity)
        self.used.index_add_(0, index.flatten(), torch.ones_like(index).flatten())
        loss = mse = reconstruction(self.atoms, x, index, coefficient)
        penalty = diversity(self.atoms)
        losses = torch.stack([mse, penalty]).detach()
        if self.options.diversity:
            self.beta = diversity_weight(*(self.last_losses if self.step else losses))
            loss = mse + self.beta * penalty  # eq. 11
        self.last_losses.copy_(losses)
        self.summed += losses
        done = self.step / (self.options.epochs * self.batches)
        self.optimizer.param_groups[0]["lr"] = self.options.learning_rate * (1 + math.cos(math.pi * done)) / 2
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            self.atoms.copy_(unit_rows(self.atoms))  # eq. 9

    @torch.no_grad()
    def end_epoch(self) -> None:
        """Validates, keeps the atoms if they are the best so far, and reseeds atoms that no vector used."""
        dead = self.used == 0
        loss = self.validation_loss()
        self.epochs[0] += 1
        if loss < self.losses[1]:
            self.best.copy_(self.atoms)
            self.losses[1], self.epochs[1] = loss, self.epochs[0]
        beta = self.beta if self.options.diversity else torch.zeros_like(loss)
        self.figures.copy_(torch.stack([x.double() for x in (*self.summed / self.batches, beta, dead.sum(), loss)]))
        if self.options.reseed and not self.stopped:
            self.reseed(dead.nonzero()[:, 0])

    def reseed(self, dead: Tensor) -> None:
        """Replaces the atoms with indices `dead` by the largest residuals of some samples, and resets their Adam moments."""
        if not len(dead):
            return
        some = torch.randperm(len(self.samples), generator=self.draw("reseed"))[: max(RESEED_VECTORS, len(dead))]
        residual = self.residual(self.samples[some.to(self.samples.device)])
        worst = residual.square().sum(1).topk(min(len(dead), len(residual))).indices
        dead = dead[: len(worst)]
        self.atoms[dead] = unit_rows(residual[worst], self.draw("zero residuals"))
        self.first_moment[dead], self.second_moment[dead] = 0, 0

    def residual(self, x: Tensor) -> Tensor:
        """Returns x - x^ for `x [V, d]`, x^ being its sparse approximation."""
        return x - desparsify(*matching_pursuit(x, self.atoms, self.task.sparsity), self.atoms)

    def validation_loss(self) -> Tensor:
        """Returns the mean of |x - x^|^2 / |x|^2 over the held-out vectors that are not 0: a float64 scalar."""
        lengths = self.heldout.double().square().sum(1)
        errors = self.residual(self.heldout).double().square().sum(1)
        return torch.where(lengths > 0, errors / lengths, 0).sum() / (lengths > 0).sum().clamp(min=1)
