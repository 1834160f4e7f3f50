"""How much an error of a key or value moves what the model says: F = E[g g^T], g the derivative of log p by the vector.

The distribution of the next token moves by KL = 1/2 d^T F d for a small error d: F is its Fisher information, block by
block. `calib/capture/gradients.py` says which derivatives are taken, and gives each sequence the same weight.
No tensor of the artifact: `transform_basis.py` makes bases of it.

A token whose components are divided by its size s before they are coded has errors in proportion to s. In units of s the Fisher
information is E[s^2 g g^T]. It is measured for r = v - M k, what keys before RoPE do not predict of a value, M the regression over
the token's sequence: s^2 = r^T R^-1 r / D, R the covariance of r in that sequence, rounded as in
`calib/runtime/stages/codec/sized.py`.
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

NOTHING = 1e-30  # added to a variance: a head whose values are all the same has no size, and no error either


class Sensitivity(Statistic):
    """Sums of g g^T over tokens, for every stream, layer and KV head, of s^2 g g^T by values; and how many sequences they are of.

    Held are float64 `[kv_heads, head_dim, head_dim]` for each layer, four times: 134 MB each for Llama 2 7B.

    Args:
        shape: the model's sizes.
        rotation: the model's RoPE; None where it cannot be unrotated.
    """

    reductions = {"moment": "sum", "sized_moment": "sum", "sequences": "sum"}

    def __init__(self, shape: Shape, rotation: Rotation | None) -> None:
        super().__init__()
        self.rotation = rotation
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
        self.register_buffer("moment", torch.zeros(len(streams(rotation)), *sizes, dtype=torch.float64))
        # Without keys before RoPE no values are predicted from them.
        self.register_buffer("sized_moment", torch.zeros(0 if rotation is None else sizes, dtype=torch.float64))
        self.register_buffer("sequences", torch.zeros(shape.layers, dtype=torch.int64))

    @property
    def is_known(self) -> bool:
        """Whether any sequence has been seen."""
        return bool(self.sequences.any())

    def observe(self, sample: LayerSample) -> None:
        """Adds a layer's derivatives, which stand in the sample for keys and values."""
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
        """None."""
        return {}

    def mean(self) -> Tensor:
        """F of a sequence in the mean: float64 `[S, L, H, D, D]`, on the CPU; 0 where nothing was seen."""
        return self.moment.cpu() / self.sequences.cpu().clamp(min=1)[:, None, None, None]

    def sized_mean(self) -> Tensor:
        """E[s^2 g g^T] by values, s the size of what keys leave of them: float64 `[L, H, D, D]`, on the CPU."""
        return self.sized_moment.cpu() / self.sequences.cpu().clamp(min=1)[:, None, None, None]


def size_of_rest(keys: Tensor, values: Tensor) -> Tensor:
    """s of every token of a sequence, float64 `[H, n, 1]` of keys before RoPE and values, float64 `[H, n, D]`."""
    keys, values = (x - x.mean(1, keepdim=True) for x in (keys, values))
    rest = values - keys @ torch.cholesky_solve(keys.mT @ values / keys.shape[1], _root(keys))
    square = (rest * torch.cholesky_solve(rest.mT, _root(rest)).mT).mean(-1, keepdim=True)
    return sized(square.clamp(min=0).sqrt()).double()


def _root(x: Tensor) -> Tensor:
    """The Cholesky factor of the covariance of centred `x [H, n, D]`, which is shrunk, so never singular: `[H, D, D]`."""
    found = shrunk(x.mT @ x / x.shape[1])
    return torch.linalg.cholesky(found + NOTHING * torch.eye(found.shape[-1], dtype=found.dtype, device=found.device))
