"""One layer of a chunk whose heads and layers help each other: what a load pays once and attention could not pay at every step.

With W channels of all KV heads, k keys before RoPE, v values, f what is decoded less its mean, and f' that of the layer before:

    k = mean_k + M_k (f'_k, f'_v) + r_k        v = mean_v + M_v (f'_k, f'_v, f_k) + r_v

Only r is coded, as `klt` codes a key of one head of W channels with a size. f is what codes say, so that errors do not add up from
layer to layer: r has them taken off. A token stands alone still: M times f is a sum of whole numbers, exact in float64 whatever its
order, and so is what codes decode to.
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
        scale: float32 `[predictors]`, powers of two, by which predictors become about what they contribute.
        table: int16 `[predictors, W]`, by `unit`.
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
        """Of `known [tokens, predictors]` float32: float32 `[tokens, W]`, the same bits however many tokens there are."""
        whole, unit = whole_numbers(known * self.scale)
        return ((whole @ self.table.double()) * unit).float() * self.unit


@dataclass(frozen=True, eq=False)
class Left:
    """How what is left of one stream is coded.

    Args:
        basis: of W channels as one head.
        codec: of its components: sizes, levels and steps. Its own words are not used.
        known: what predicts.
    """

    basis: Basis
    codec: Sized
    known: Known

    @classmethod
    def of(cls, artifact: Artifact, role: str, layer: int, allocation: Allocation) -> "Left":
        """Of keys or values of a layer. Raises `ArtifactError` for numbers beyond float32."""
        codes = layer_codes(artifact, role, layer, allocation.streams[role][layer], JOINT)
        assert isinstance(codes.codec, Sized)
        return cls(codes.basis, codes.codec, Known.of(artifact.tensor(JOINT.name(role, "matrix"))[layer]))

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the fields of a token: its codes, and its size."""
        return (*self.codec.codec.level_bits, SIZE_BITS)

    @property
    def mean(self) -> Tensor:
        """float32 `[1, W]`."""
        return self.basis.mean[0]

    def encoded(self, left: Tensor) -> Tensor:
        """The fields int64 `[tokens, n]` of x - M f, `[tokens, W]` float32."""
        y = self.basis.forward(left[None])
        number = self.codec.numbers(y)
        assert isinstance(self.codec.codec, MixedQuant)
        return torch.cat([self.codec.codec.nearest(y / size_of(number)), number], -1)[0]

    def decoded(self, fields: Tensor, predicted: Tensor) -> Tensor:
        """f: M f' and r as fields say, float32 `[tokens, W]`; finite whatever they say, and so what the next layer makes of it."""
        codes, number = fields[None].split([fields.shape[1] - 1, 1], -1)
        left = self.basis.inverse_of_codes(codes, size_of(number))[0] - self.mean
        return (predicted + left).clamp_(-MOST_REACH, MOST_REACH)


@dataclass(frozen=True, eq=False)
class JointLayerCoder:
    """One layer, all its heads as one of W channels.

    Args:
        keys, values: their stages.
        heads: KV heads.
    """

    keys: Left
    values: Left
    heads: int

    @classmethod
    def of(cls, artifact: Artifact, layer: int, allocation: Allocation) -> "JointLayerCoder":
        """Of an artifact that has codes for storage. Raises `ArtifactError` for numbers beyond float32."""
        keys, values = (Left.of(artifact, role, layer, allocation) for role in ("keys", "values"))
        return cls(keys, values, artifact.fingerprint["kv_heads"])

    @cached_property
    def fields(self) -> BitFields:
        """Of a token: codes of keys, their size, codes of values, their size."""
        return BitFields(self.keys.widths + self.values.widths)

    def widths(self) -> dict[str, int]:
        """Words of 16 bits of a token."""
        return {"words": self.fields.words}

    def to(self, device: torch.device) -> "JointLayerCoder":
        """The same with its tables there."""
        return to_device(self, device)

    def encode(self, keys: Tensor, values: Tensor, before: Tensor | None) -> tuple[Block, Tensor]:
        """Fields int16 `[tokens, width]` of unrotated keys and of values, `[kv_heads, tokens, D]`, float; and f of both, float32
        `[tokens, 2 W]`, which the next layer is told. `before` is what the one before has told, None in the first layer."""
        told, numbers = self._start(before, keys.shape[1]), list[Tensor]()
        for stage, x in zip(self._streams, (keys, values), strict=True):
            predicted = stage.known.predicted(told)
            numbers.append(stage.encoded(x.transpose(0, 1).flatten(1).float() - predicted))
            told = torch.cat([told, stage.decoded(numbers[-1], predicted)], -1)
        return {"words": self.fields.packed(torch.cat(numbers, -1))}, told[:, told.shape[1] // 2 :]

    def decode(self, block: Block, tokens: int, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Unrotated keys and values, float32 `[kv_heads, tokens, D]`, of what `encode` gives; and what the next layer is told."""
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
        """f of the layer before; there is none before the first, whose M are 0 for it."""
        return self.keys.mean.new_zeros(tokens, 2 * self.keys.mean.shape[1]) if before is None else before
