"""Values predicted from keys: both come from the same hidden state, so a decoded key before RoPE tells much about the value.

    v = mean_v + M (k^ - mean_k) + r        sum_t p_t v^_t = mean_v + M (sum_t p_t (k^_t - mean_k)) + sum_t p_t r^_t

Only r is coded. Attention sums the codes of keys with the same weights as those of values, and applies M to the sum, once a step;
predicted values are never formed. The prediction is made from the decoded key k^, so an error of the key is contained in r and is
no error of the value. (AQUA-KV, arXiv:2501.19392, predicts values as well, and forms them before attention.)

A token's r must not depend on its batch: M times codes is a sum of whole numbers, exact in float64 in any order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import PredictedValues
from calib.kernels.attend.reference import predicted_mixture
from calib.kernels.predictions.operation import supported, unpredicted
from calib.runtime.paging.field import Block
from calib.runtime.stages.codec.sized import Sized

ENTRY = 2**15 - 1  # the largest entry of the table


@dataclass(frozen=True, eq=False)
class Prediction:
    """M (k^ - mean_k) of one layer, from the codes of its keys; callers give the keys' codec.

    Args:
        table: int16 `[kv_heads, N, D]`: what half a step of each of N components of a key of size 1 changes in the value's D
            channels, in multiples of `unit`.
        unit: float32 `[kv_heads, 1, D]`, powers of two.
    """

    table: Tensor
    unit: Tensor

    @classmethod
    def of(cls, half_steps: Tensor) -> "Prediction":
        """From what half a step of each component changes in the value's channels: float64 `[kv_heads, N, D]`."""
        return cls(*whole_table(half_steps))

    def taken_off(self, values: Tensor, codec: Sized, keys: Block) -> Tensor:
        """`values [rows, kv_heads, tokens, D]` minus predictions from encoded keys, fields `[rows, 1, tokens, W]`: float32."""
        stream = codec.packed(keys, self.table.shape[-2], {})
        if stream is not None and supported(values, stream):
            return unpredicted(values, stream, self.of_codes(codec))
        return values.float() - self.values(codec, keys)

    def values(self, codec: Sized, keys: Block) -> Tensor:
        """Predictions from encoded keys, fields `[..., kv_heads or 1, tokens, W]`: float32 `[..., kv_heads, tokens, D]`."""
        tile = {name: field.mT for name, field in keys.items()}
        numbers = self._numbers(codec, codec.codec.codes(tile)).mT
        return (numbers @ self.table.double()).float() * self.unit * codec.sizes(tile).mT

    def mix(self, codec: Sized, weights: Tensor, keys: Block) -> Tensor:
        """Sums of a tile's predictions by `weights [..., kv_heads, rows, tokens]` float32: `[..., kv_heads, rows, D]`."""
        return predicted_mixture(self.of_codes(codec), codec.mixed_codes(weights, keys))

    def of_codes(self, codec: Sized) -> PredictedValues:
        """The form that attention's kernels take, which sum the keys' codes themselves."""
        return PredictedValues(self.table, self.unit, codec.codec.levels(self.table.device))

    @staticmethod
    def _numbers(codec: Sized, codes: Tensor) -> Tensor:
        """2 c - L, a whole number: how many half steps a code c is from the middle of its levels 0 ... L."""
        return 2 * codes.double() - codec.codec.levels(codes.device).double()[:, None]


def whole_table(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix [..., N, D]` float64 rounded to int16 multiples of a unit, and the unit, float32 `[..., 1, D]`, powers of two."""
    largest = matrix.abs().amax(-2, keepdim=True).clamp(min=2.0**-100)
    mantissa, exponent = torch.frexp(largest / ENTRY)
    unit = torch.ldexp(torch.ones_like(mantissa), exponent)
    return (matrix / unit).round().to(torch.int16), unit.float()
