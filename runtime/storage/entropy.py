"""An entropy coder for the codes of a chunk: the same codes in fewer bytes, whose number is known only after encoding.

A component's codes are about normally distributed when components are divided by their token's size: middle codes are more
frequent than outer ones. With step r in units of the component's deviation, a code c of b bits has the probability

    p(c) = (1 - e) (F(right) - F(left)) + e / 2^b        left, right = (c - 2^(b - 1)) r, (c + 1 - 2^(b - 1)) r

where `left` of the first code is minus infinity, `right` of the last one infinity, and F is the normal distribution function. The
term with e keeps the cost small for text of another kind, whose outer codes are more frequent. r is rounded to an eighth of an
octave, so that components of equal b and r share a table. The number of a token's size has a table as well.

Tables follow from the artifact and the budget. The package `constriction` codes field by field, the fields of one table after each
other.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.kernels.attend.operation import SIZE_BITS, SIZE_OF_ONE
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import ROLES, Allocation
from calib.runtime.paging.field import Block
from calib.runtime.storage.bit_fields import BitFields
from calib.runtime.storage.header import AGAIN, BlobError
from calib.runtime.storage.joint_layer import JOINT, JointLayerCoder
from calib.runtime.storage.profiles import LayerCoders

try:
    import constriction
except ImportError:
    constriction = None

MISSING = "entropy=True needs the package constriction: pip install 'calib-kv[entropy]'"
PER_OCTAVE, MOST_OCTAVES = 8, 16  # tables for each octave of r, and the most octaves from r = 1
FLAT = 1 / 64  # e
UNITS = 2**16  # probabilities are rounded to multiples of 1 / UNITS
WORD_BYTES = 4  # of a word of the coder's output


class Table(NamedTuple):
    """The distribution of a field's numbers: normal, by its step and middle.

    Attributes:
        width: width of the field in bits.
        step: the step of the field's numbers over the deviation of what they stand for, as its logarithm in eighths of an octave.
        middle: the mean of the numbers, a multiple of 1/2.
    """

    width: int
    step: int
    middle: float

    def counts(self) -> Tensor:
        """Approximate probabilities of the numbers in units of 2^-16: float32 `[2^width]`, whole numbers of at least 1."""
        numbers = torch.arange(1 << self.width, dtype=torch.float64)
        edges = (numbers[1:] - 0.5 - self.middle) * 2.0 ** (self.step / PER_OCTAVE)
        # Differences of F are taken from the nearer tail, where F is small and they are accurate.
        below, above = torch.special.ndtr(edges), torch.special.ndtr(-edges)
        ends = below.new_zeros(1), below.new_ones(1)
        rising = torch.cat([ends[0], below, ends[1]]).diff()
        falling = -torch.cat([ends[1], above, ends[0]]).diff()
        normal = rising.where(numbers < self.middle, falling)
        return (UNITS * ((1 - FLAT) * normal + FLAT / len(numbers))).round().clamp(min=1).float()


@dataclass(frozen=True)
class EntropyCoder:
    """Range coder for the codes of chunks.

    Args:
        fields: the bit fields of a token in each layer.
        tables: the distribution of every field, in that order.
    """

    fields: Sequence[BitFields]
    tables: Sequence[Table]

    @classmethod
    def of(cls, artifact: Artifact, allocation: Allocation, layers: LayerCoders) -> "EntropyCoder":
        """The coder for layers whose heads have one basis. Raises ValueError without the package constriction."""
        if constriction is None:
            raise ValueError(MISSING)
        tables, fields = list[Table](), list[BitFields]()
        for layer, coder in enumerate(layers):
            assert isinstance(coder, JointLayerCoder)
            fields.append(coder.fields)
            for role in ROLES:
                steps, errors = (artifact.tensor(JOINT.name(role, kind))[layer, 0] for kind in ("steps", "errors"))
                tables += [*_of_components(allocation.streams[role][layer].widths, steps, errors), SIZES]
        return cls(fields, tables)

    def identity(self) -> bytes:
        """A hash of all tables, 16 bytes. If another machine rounds a table differently, its blobs are refused, not misread."""
        found = hashlib.blake2b(digest_size=16)
        for table, fields in self._groups:
            found.update(repr((table.counts().int().tolist(), fields.tolist())).encode())
        return found.digest()

    def least_bytes(self, tokens: int) -> int:
        """A lower bound of the bytes of `tokens` tokens: if all fields have their most frequent number, with 1 % and two words less
        for the coder's rounding."""
        return max(0, int(tokens * self._least_bits / 8 * 0.99) - 2 * WORD_BYTES)

    def coded(self, layers: Sequence[Block]) -> Tensor:
        """Encodes all layers' words, int16 `[tokens, words]` in host memory, into uint8."""
        numbers = torch.cat([own.unpacked(block["words"]) for own, block in zip(self.fields, layers, strict=True)], -1)
        rows, coder = numbers.T.contiguous(), constriction.stream.queue.RangeEncoder()
        for model, fields in self._models:
            coder.encode(rows[fields].flatten().numpy(), model)
        return torch.from_numpy(coder.get_compressed().astype("<u4").view("u1"))

    def words(self, data: Tensor, tokens: int) -> Tensor:
        """Decodes the output of `coded`, uint8 that need not be trusted, into all layers' words one after the other, int16. Raises
        BlobError if it is no such output."""
        if len(data) % WORD_BYTES:
            raise BlobError(f"the blob's codes have {len(data)} bytes, expected whole words of {WORD_BYTES}; {AGAIN}")
        coder = constriction.stream.queue.RangeDecoder(data.numpy().view("<u4").astype("u4"))
        rows = torch.empty(len(self.tables), tokens, dtype=torch.int32)
        try:
            for model, fields in self._models:
                rows[fields] = torch.from_numpy(coder.decode(model, len(fields) * tokens)).view(-1, tokens)
        except AssertionError as error:  # what constriction raises for bytes that no numbers have
            raise BlobError(f"the blob's codes cannot be decoded; {AGAIN}") from error
        parts = rows.T.split([len(own.widths) for own in self.fields], -1)
        return torch.cat([own.packed(part).flatten() for own, part in zip(self.fields, parts, strict=True)])

    @cached_property
    def _groups(self) -> list[tuple[Table, Tensor]]:
        """Each table with the indices of its fields, int64."""
        found = dict[Table, list[int]]()
        for field, table in enumerate(self.tables):
            found.setdefault(table, []).append(field)
        return [(table, torch.tensor(found[table])) for table in sorted(found)]

    @cached_property
    def _models(self) -> list[tuple[Any, Tensor]]:
        """The model of the package constriction for each table, with the indices of its fields."""
        return [
            (constriction.stream.model.Categorical(table.counts().numpy(), perfect=False), fields)
            for table, fields in self._groups
        ]

    @cached_property
    def _least_bits(self) -> float:
        """The least number of bits of a token."""
        most = [(table.counts(), len(fields)) for table, fields in self._groups]
        return sum(count * float((own.double().sum() / own.double().amax()).log2()) for own, count in most)


def _of_components(widths: tuple[int, ...], steps: Tensor, errors: Tensor) -> list[Table]:
    """The tables of a stream's first components, from its tensors `steps [W, 8]` and `errors [W, 9]`."""
    found, least = list[Table](), torch.finfo(torch.float64).tiny
    for width, step, error in zip(widths, steps.tolist(), errors.tolist(), strict=False):
        # For a component without variance in the corpus any table will do.
        octaves = math.log2(step[width - 1] / max(math.sqrt(error[0]), least))
        ratio = round(PER_OCTAVE * min(MOST_OCTAVES, max(-MOST_OCTAVES, octaves)))
        found.append(Table(width, ratio, ((1 << width) - 1) / 2))
    return found


# Errors of the layer before make sizes a little larger than in the fit, so the middle is one above size 1.
SIZES = Table(SIZE_BITS, 0, SIZE_OF_ONE + 1.0)
