"""How much an error of a key or value changes the model's predictions: F = E[g g^T], g the derivative of log p by the vector.

A small error d changes the next token's distribution by KL = 1/2 d^T F d: F is a diagonal block (one layer, head and stream) of the
Fisher information. `calib/capture/gradients.py` defines the derivatives and gives each sequence the same weight. F is no tensor of
the artifact; `transform_basis.py` computes bases from it.

If a token's components are divided by its size s before they are coded, its errors are proportional to s, and in units of s the
Fisher information is E[s^2 g g^T]. It is measured for the rest r = v - M k of a value v that its key k before RoPE does not
predict, M being the regression over the token's sequence: s^2 = r^T R^-1 r / D, with R the covariance of r in that sequence, and s
rounded as in `calib/runtime/stages/codec/sized.py`. Shapes: S streams, L layers, H KV heads, D = head_dim.
"""

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.sized import sized
from calib.statistics.contract import Statistic, tokens_of
from calib.statistics.shrinkage import shrunk
from calib.statistics.transformed_streams import streams, vectors

NOTHING = 1e-30  # added to variances, which are 0 in a head whose values are all equal


class Sensitivity(Statistic):
    """Sums over tokens of g g^T for every stream, layer and KV head, of s^2 g g^T for values, and the number of sequences.

    The four moments are float64 `[layers, kv_heads, head_dim, head_dim]`: 134 MB each for Llama 2 7B.

    Args:
        shape: the model's sizes.
        rotation: the model's RoPE; None if it cannot be unrotated (then there are only two moments).
    """

    reductions = {"moment": "sum", "sized_moment": "sum", "sequences": "sum"}

    def __init__(self, shape: Shape, rotation: Rotation | None) -> None:
        super().__init__()
        self.rotation = rotation
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
        self.register_buffer("moment", torch.zeros(len(streams(rotation)), *sizes, dtype=torch.float64))
        # Values are predicted only from keys before RoPE.
        self.register_buffer("sized_moment", torch.zeros(0 if rotation is None else sizes, dtype=torch.float64))
        self.register_buffer("sequences", torch.zeros(shape.layers, dtype=torch.int64))

    @property
    def is_known(self) -> bool:
        """Whether any sequence was measured."""
        return bool(self.sequences.any())

    def observe(self, sample: LayerSample) -> None:
        """Adds a layer's derivatives, which are the sample's keys and values (`calib/capture/gradients.py`)."""
        self.sequences[sample.layer] += len(sample.keys)
        derived = vectors(sample, self.rotation)
        for number, g in enumerate(derived):
            rows = tokens_of(g, sample.mask).double()
            self.moment[number, sample.layer] += (rows.mT @ rows).to(self.moment.device)
        if self.rotation is None:
            return
        assert sample.taken_at is not None
        _, values, before = vectors(sample.taken_at, self.rotation)
        for row, real in enumerate(sample.mask):
            if bool(real.any()):
                g, v, k = (x[row, :, real].double() for x in (derived[1], values, before))
                g = g * size_of_rest(k, v)
                self.sized_moment[sample.layer] += (g.mT @ g).to(self.sized_moment.device)

    def tensors(self) -> dict[str, Tensor]:
        """Returns no tensors."""
        return {}

    def mean(self) -> Tensor:
        """Returns the mean over sequences of sum g g^T: float64 `[S, L, H, D, D]`, on the CPU; 0 in layers without samples."""
        return self.moment.cpu() / self.sequences.cpu().clamp(min=1)[:, None, None, None]

    def sized_mean(self) -> Tensor:
        """Returns the mean over sequences of sum s^2 g g^T for values, s the size of r: float64 `[L, H, D, D]`, on the CPU."""
        return self.sized_moment.cpu() / self.sequences.cpu().clamp(min=1)[:, None, None, None]


def size_of_rest(keys: Tensor, values: Tensor) -> Tensor:
    """Returns s of every token of a sequence, float64 `[H, n, 1]`, from keys before RoPE and values, float64 `[H, n, D]`."""
    keys, values = (x - x.mean(1, keepdim=True) for x in (keys, values))
    rest = values - keys @ torch.cholesky_solve(keys.mT @ values / keys.shape[1], _root(keys))
    square = (rest * torch.cholesky_solve(rest.mT, _root(rest)).mT).mean(-1, keepdim=True)
    return sized(square.clamp(min=0).sqrt()).double()


def _root(x: Tensor) -> Tensor:
    """Returns the Cholesky factor `[H, D, D]` of the covariance of centred `x [H, n, D]`, shrunk so that it is not singular."""
    found = shrunk(x.mT @ x / x.shape[1])
    return torch.linalg.cholesky(found + NOTHING * torch.eye(found.shape[-1], dtype=found.dtype, device=found.device))
