"""One layer of a chunk in the profile "storage": all heads are coded together, and predicted from the layer before. A load does
this once; it would be too much work for attention in every step.

W: channels of all KV heads; k: keys before RoPE; v: values; f: decoded k or v minus its mean; f': f of the layer before:

    k = mean_k + M_k (f'_k, f'_v) + r_k        v = mean_v + M_v (f'_k, f'_v, f_k) + r_v

Only r is coded, as `klt` codes a key of one head of W channels with a size. Predictions are made from decoded f, so that errors are
contained in r and do not add up from layer to layer. Tokens are coded independently: M times f is a sum of whole numbers, exact in
float64 in any order, and so is the decoding of codes.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from calib.kernels.attend.operation import SIZE_BITS
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import Allocation
from calib.runtime.artifact.components import MOST_REACH, Coding, layer_codes
from calib.runtime.paging.field import Block
from calib.runtime.stages.codec import MixedQuant, Sized
from calib.runtime.stages.codec.sized import size_of
from calib.runtime.stages.exact_sums import whole_numbers
from calib.runtime.stages.prediction import whole_table
from calib.runtime.stages.to_device import to_device
from calib.runtime.stages.transform import Basis
from calib.runtime.storage.bit_fields import BitFields

JOINT = Coding("before", size=True, predict=True, joint=True)


@dataclass(frozen=True, eq=False)
class Known:
    """M of one stream, in whole numbers: sums of products of 22 and 15 bits are exact in float64 up to 65,536 predictors.

    Args:
        scale: float32 `[predictors]`, powers of two: the factors of predictors, by which rows of M are divided.
        table: int16 `[predictors, W]`, in multiples of `unit`.
        unit: float32 `[1, W]`, powers of two.
    """

    scale: Tensor
    table: Tensor
    unit: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> "Known":
        """From M transposed, `[predictors, W]`."""
        largest = matrix.double().abs().amax(-1)
        _, exponent = torch.frexp(largest)
        scale = torch.ldexp(torch.ones_like(largest), exponent).where(largest > 0, 0)
        rows = matrix.double() / scale.where(largest > 0, 1)[:, None]
        return cls(scale.float(), *whole_table(rows))

    def predicted(self, known: Tensor) -> Tensor:
        """Predictions float32 `[tokens, W]` from `known [tokens, predictors]` float32; their bits do not depend on other tokens."""
        whole, unit = whole_numbers(known * self.scale)
        return ((whole @ self.table.double()) * unit).float() * self.unit


@dataclass(frozen=True, eq=False)
class Left:
    """The coding of one stream's residual r.

    Args:
        basis: transform of W channels as one head.
        codec: codec of its components, used for sizes, levels and steps; its words are not used.
        known: the matrix of its prediction.
    """

    basis: Basis
    codec: Sized
    known: Known

    @classmethod
    def of(cls, artifact: Artifact, role: str, layer: int, allocation: Allocation) -> "Left":
        """For keys or values of a layer. Raises `ArtifactError` for numbers beyond float32."""
        codes = layer_codes(artifact, role, layer, allocation.streams[role][layer], JOINT)
        assert isinstance(codes.codec, Sized)
        return cls(codes.basis, codes.codec, Known.of(artifact.tensor(JOINT.name(role, "matrix"))[layer]))

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a token's fields in bits: its codes, then its size."""
        return (*self.codec.codec.level_bits, SIZE_BITS)

    @property
    def mean(self) -> Tensor:
        """The mean of the stream, float32 `[1, W]`."""
        return self.basis.mean[0]

    def encoded(self, left: Tensor) -> Tensor:
        """The fields int64 `[tokens, n]` of `left` = x - M f, `[tokens, W]` float32."""
        y = self.basis.forward(left[None])
        number = self.codec.numbers(y)
        assert isinstance(self.codec.codec, MixedQuant)
        return torch.cat([self.codec.codec.nearest(y / size_of(number)), number], -1)[0]

    def decoded(self, fields: Tensor, predicted: Tensor) -> Tensor:
        """Decoded f = M f' + r from `predicted` = M f' and the fields of r, float32 `[tokens, W]`. It is clamped, so that it and
        the next layer's predictions are finite for any fields."""
        codes, number = fields[None].split([fields.shape[1] - 1, 1], -1)
        left = self.basis.inverse_of_codes(codes, size_of(number))[0] - self.mean
        return (predicted + left).clamp_(-MOST_REACH, MOST_REACH)


@dataclass(frozen=True, eq=False)
class JointLayerCoder:
    """Coder of one layer, with all its heads as one of W channels.

    Args:
        keys, values: coding of their residuals.
        heads: number of KV heads.
    """

    keys: Left
    values: Left
    heads: int

    @classmethod
    def of(cls, artifact: Artifact, layer: int, allocation: Allocation) -> "JointLayerCoder":
        """From an artifact with tensors for storage. Raises `ArtifactError` for numbers beyond float32."""
        keys, values = (Left.of(artifact, role, layer, allocation) for role in ("keys", "values"))
        return cls(keys, values, artifact.fingerprint["kv_heads"])

    @cached_property
    def fields(self) -> BitFields:
        """The bit fields of a token: codes of keys, their size, codes of values, their size."""
        return BitFields(self.keys.widths + self.values.widths)

    def widths(self) -> dict[str, int]:
        """Number of 16-bit words of a token."""
        return {"words": self.fields.words}

    def to(self, device: torch.device) -> "JointLayerCoder":
        """The same with its tables on `device`."""
        return to_device(self, device)

    def encode(self, keys: Tensor, values: Tensor, before: Tensor | None) -> tuple[Block, Tensor]:
        """Encodes unrotated keys and values, `[kv_heads, tokens, D]`, float, into fields int16 `[tokens, width]`; also returnss f
        of both, float32 `[tokens, 2 W]`, for the next layer. `before` is f of the layer before, None in the first layer."""
        told, numbers = self._start(before, keys.shape[1]), list[Tensor]()
        for stage, x in zip(self._streams, (keys, values), strict=True):
            predicted = stage.known.predicted(told)
            numbers.append(stage.encoded(x.transpose(0, 1).flatten(1).float() - predicted))
            told = torch.cat([told, stage.decoded(numbers[-1], predicted)], -1)
        return {"words": self.fields.packed(torch.cat(numbers, -1))}, told[:, told.shape[1] // 2 :]

    def decode(self, block: Block, tokens: int, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Decodes fields into unrotated keys and values, float32 `[kv_heads, tokens, D]`, and f for the next layer."""
        told, found = self._start(before, tokens), list[Tensor]()
        numbers = self.fields.unpacked(block["words"]).split([len(stage.widths) for stage in self._streams], -1)
        for stage, own in zip(self._streams, numbers, strict=True):
            decoded = stage.decoded(own, stage.known.predicted(told))
            told = torch.cat([told, decoded], -1)
            found.append((decoded + stage.mean).unflatten(-1, (self.heads, -1)).transpose(0, 1))
        keys, values = found
        return keys, values, told[:, told.shape[1] // 2 :]

    @property
    def _streams(self) -> tuple[Left, Left]:
        return self.keys, self.values

    def _start(self, before: Tensor | None, tokens: int) -> Tensor:
        """f of the layer before; zeros in the first layer, whose M is 0 for it."""
        return self.keys.mean.new_zeros(tokens, 2 * self.keys.mean.shape[1]) if before is None else before
