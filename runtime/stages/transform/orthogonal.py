"""Rotation by an orthogonal matrix, the same for all heads or one for each: it keeps lengths and inner products, and spreads each
channel over all.

    y = R x        x^ = R^T y^        q.x^ = (R q).y^

After a random rotation one table suits all coordinates (TurboQuant, arXiv:2504.19874, section 3); after Hadamard's no channel is an
outlier (KVarN, arXiv:2606.03458); a calibrated one moves errors to where attention weighs least (OSCAR, arXiv:2605.17757).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from calib.runtime.stages.contract import Transform
from calib.runtime.stages.exact_sums import WHOLE_BITS, whole_numbers
from calib.runtime.stages.hadamard import hadamard
from calib.runtime.stages.shared_table import SharedTable


@dataclass(frozen=True, eq=False)
class Orthogonal(Transform):
    """The same matrix for all tokens.

    Args:
        matrix: R, float32 `[D, D]` for all KV heads or `[kv_heads, D, D]`, orthogonal, its entries multiples of 2^-22.
    """

    matrix: SharedTable

    @classmethod
    def of(cls, matrix: Tensor) -> "Orthogonal":
        """From R of any float dtype, `[D, D]` or `[kv_heads, D, D]`, rounded to multiples of 2^-22."""
        return cls(SharedTable((matrix.double() * 2.0**WHOLE_BITS).round_().div_(2.0**WHOLE_BITS).float()))

    @classmethod
    def drawn(cls, channels: int, seed: int) -> "Orthogonal":
        """With R drawn uniformly from the orthogonal matrices `[channels, channels]`; one shared table for each seed."""
        return _drawn(channels, seed)

    @classmethod
    def hadamard(cls, channels: int) -> "Orthogonal":
        """With the normalised Hadamard matrix, in equal blocks if `channels` is no power of two; one shared table."""
        return _hadamard(channels)

    @classmethod
    def random_hadamard(cls, channels: int, seed: int) -> "Orthogonal":
        """With the Hadamard matrix and random signs of the channels: R = H diag(+-1). Without the signs channels of one sign would
        add up in the first coordinate. One shared table for each seed."""
        return _random_hadamard(channels, seed)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., kv_heads, tokens, D]` -> y float32 of the same shape."""
        whole, unit = whole_numbers(x)
        rotated = whole @ self.matrix.tensor.double().mul_(2.0**WHOLE_BITS).mT
        return rotated.mul_(unit * 2.0**-WHOLE_BITS).float()

    def inverse(self, y: Tensor) -> Tensor:
        """x^ float32 from decoded y."""
        return y @ self.matrix.tensor.to(y.dtype)

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """(R q, nothing to add)."""
        return query @ self.matrix.tensor.mT, None

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """sum p x^ = R^T sum p y^."""
        return mixed @ self.matrix.tensor

    def tensors(self) -> list[Tensor]:
        """R."""
        return [self.matrix.tensor]

    @property
    def growth(self) -> float:
        """sqrt(D): a token of D equal values may become a single one, its length."""
        return math.sqrt(self.matrix.tensor.shape[-1])


@lru_cache(maxsize=16)
def _hadamard(channels: int) -> Orthogonal:
    return Orthogonal.of(hadamard(channels))


@lru_cache(maxsize=16)
def _random_hadamard(channels: int, seed: int) -> Orthogonal:
    signs = torch.randint(2, (channels,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return Orthogonal.of(hadamard(channels) * signs)


@lru_cache(maxsize=16)
def _drawn(channels: int, seed: int) -> Orthogonal:
    """The orthogonal factor of a Gaussian matrix, with the signs that make it uniform (Mezzadri, math-ph/0609050)."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
    orthogonal, triangular = torch.linalg.qr(gaussian)
    orthogonal *= triangular.diagonal().sign()
    return Orthogonal.of(orthogonal)
