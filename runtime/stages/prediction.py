"""Values predicted from keys: both come from the same hidden state, so a decoded key before RoPE tells much of its token's value.

    v = mean_v + M (k^ - mean_k) + r        sum_t p_t v^_t = mean_v + M (sum_t p_t (k^_t - mean_k)) + sum_t p_t r^_t

Only r is coded. Attention mixes the codes of keys by the same weights as those of values, and applies M to the mixture, once a
step; no value is ever put together. k^ is what the codes say, so an error of keys is no error of values: r has it taken off.
(AQUA-KV, arXiv:2501.19392, predicts values as well, and puts them together before attention.)

A token's r must not depend on its batch: M times codes is a sum of whole numbers, exact in float64 whatever its order.
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
    """M (k^ - mean_k) of one layer, from the codes of its keys. The keys' codec is the caller's.

    Args:
        table: int16 `[kv_heads, N, D]`: half a step of each of N components of a key of size 1, in channels of the value, by
            `unit`.
        unit: float32 `[kv_heads, 1, D]`, powers of two.
    """

    table: Tensor
    unit: Tensor

    @classmethod
    def of(cls, half_steps: Tensor) -> "Prediction":
        """From float64 `[kv_heads, N, D]`."""
        return cls(*whole_table(half_steps))

    def taken_off(self, values: Tensor, codec: Sized, keys: Block) -> Tensor:
        """`values [rows, kv_heads, tokens, D]` less what their keys, fields `[rows, 1, tokens, W]`, predict: float32."""
        stream = codec.packed(keys, self.table.shape[-2], {})
        if stream is not None and supported(values, stream):
            return unpredicted(values, stream, self.of_codes(codec))
        return values.float() - self.values(codec, keys)

    def values(self, codec: Sized, keys: Block) -> Tensor:
        """Of tokens whose keys are encoded, fields `[..., kv_heads or 1, tokens, W]`: float32 `[..., kv_heads, tokens, D]`."""
        tile = {name: field.mT for name, field in keys.items()}
        numbers = self._numbers(codec, codec.codec.codes(tile)).mT
        return (numbers @ self.table.double()).float() * self.unit * codec.sizes(tile).mT

    def mix(self, codec: Sized, weights: Tensor, keys: Block) -> Tensor:
        """`weights [..., kv_heads, rows, tokens]` float32 times the predictions of a tile: `[..., kv_heads, rows, D]`."""
        return predicted_mixture(self.of_codes(codec), codec.mixed_codes(weights, keys))

    def of_codes(self, codec: Sized) -> PredictedValues:
        """As attention's kernels take it, which mix the keys' codes themselves."""
        return PredictedValues(self.table, self.unit, codec.codec.levels(self.table.device))

    @staticmethod
    def _numbers(codec: Sized, codes: Tensor) -> Tensor:
        """2 c - L, whole: how many half steps a code is from the middle."""
        return 2 * codes.double() - codec.codec.levels(codes.device).double()[:, None]


def whole_table(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix [..., N, D]` float64 in whole numbers int16, and their unit, float32 `[..., 1, D]`, powers of two."""
    largest = matrix.abs().amax(-2, keepdim=True).clamp(min=2.0**-100)
    mantissa, exponent = torch.frexp(largest / ENTRY)
    unit = torch.ldexp(torch.ones_like(mantissa), exponent)
    return (matrix / unit).round().to(torch.int16), unit.float()
