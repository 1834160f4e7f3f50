"""An entropy coder behind the codes of a chunk: the same codes in fewer bytes, of a number that is known when they are made.

A component's codes are about normal, over their token's size: those in the middle are more frequent than the outer ones. With
step r in units of the component's deviation, a code c of b bits has the probability

    p(c) = (1 - e) (F(right) - F(left)) + e / 2^b        left, right = (c - 2^(b - 1)) r, (c + 1 - 2^(b - 1)) r

where the first code reaches down to minus infinity and the last one up to infinity, and F is the normal distribution. With e
text of another kind, whose outer codes are more frequent, costs little. r is rounded to an eighth of an octave, so that
components of the same b and r share a table. The number of a token's size has a table as well.

Tables follow from the artifact and the budget. Coded is by `constriction`, field by field, those of one table behind each other.
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
PER_OCTAVE, MOST_OCTAVES = 8, 16  # tables of a width, and how far from a step of one deviation
FLAT = 1 / 64  # e
UNITS = 2**16  # that probabilities are rounded to
WORD_BYTES = 4  # of what the coder makes


class Table(NamedTuple):
    """The distribution of a field's numbers: normal, by its step and middle.

    Attributes:
        width: of the field, in bits.
        step: in eighths of an octave over the deviation of what the field counts.
        middle: the number in the middle, halves counted.
    """

    width: int
    step: int
    middle: float

    def counts(self) -> Tensor:
        """Probabilities of the numbers in units of 2^-16, about: float32 `[2^width]`, whole numbers from 1 on."""
        numbers = torch.arange(1 << self.width, dtype=torch.float64)
        edges = (numbers[1:] - 0.5 - self.middle) * 2.0 ** (self.step / PER_OCTAVE)
        # From the nearer end, where the distribution is small and its differences are exact.
        below, above = torch.special.ndtr(edges), torch.special.ndtr(-edges)
        ends = below.new_zeros(1), below.new_ones(1)
        rising = torch.cat([ends[0], below, ends[1]]).diff()
        falling = -torch.cat([ends[1], above, ends[0]]).diff()
        normal = rising.where(numbers < self.middle, falling)
        return (UNITS * ((1 - FLAT) * normal + FLAT / len(numbers))).round().clamp(min=1).float()


@dataclass(frozen=True)
class EntropyCoder:
    """Range coding of the codes of chunks whose layers have these fields.

    Args:
        fields: of a token, layer by layer.
        tables: of all fields in that order.
    """

    fields: Sequence[BitFields]
    tables: Sequence[Table]

    @classmethod
    def of(cls, artifact: Artifact, allocation: Allocation, layers: LayerCoders) -> "EntropyCoder":
        """Of layers whose heads have one basis. Raises ValueError without constriction."""
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
        """16 bytes for all tables. Where another machine rounds one otherwise, its blobs are refused and not misread."""
        found = hashlib.blake2b(digest_size=16)
        for table, fields in self._groups:
            found.update(repr((table.counts().int().tolist(), fields.tolist())).encode())
        return found.digest()

    def least_bytes(self, tokens: int) -> int:
        """Fewer than any so many tokens take, a little: each field's most frequent number, and what the coder rounds."""
        return max(0, int(tokens * self._least_bits / 8 * 0.99) - 2 * WORD_BYTES)

    def coded(self, layers: Sequence[Block]) -> Tensor:
        """uint8, of all layers' words int16 `[tokens, words]` in host memory."""
        numbers = torch.cat([own.unpacked(block["words"]) for own, block in zip(self.fields, layers, strict=True)], -1)
        rows, coder = numbers.T.contiguous(), constriction.stream.queue.RangeEncoder()
        for model, fields in self._models:
            coder.encode(rows[fields].flatten().numpy(), model)
        return torch.from_numpy(coder.get_compressed().astype("<u4").view("u1"))

    def words(self, data: Tensor, tokens: int) -> Tensor:
        """All layers' words behind each other, int16, of what `coded` gives: uint8, untrusted. Raises BlobError where no words are
        coded so."""
        if len(data) % WORD_BYTES:
            raise BlobError(f"the blob's codes have {len(data)} bytes, expected whole words of {WORD_BYTES}; {AGAIN}")
        coder = constriction.stream.queue.RangeDecoder(data.numpy().view("<u4").astype("u4"))
        rows = torch.empty(len(self.tables), tokens, dtype=torch.int32)
        try:
            for model, fields in self._models:
                rows[fields] = torch.from_numpy(coder.decode(model, len(fields) * tokens)).view(-1, tokens)
        except AssertionError as error:  # what constriction raises for bytes that no numbers have
            raise BlobError(f"the blob's codes are those of no chunk; {AGAIN}") from error
        parts = rows.T.split([len(own.widths) for own in self.fields], -1)
        return torch.cat([own.packed(part).flatten() for own, part in zip(self.fields, parts, strict=True)])

    @cached_property
    def _groups(self) -> list[tuple[Table, Tensor]]:
        """Each table with its fields, int64."""
        found = dict[Table, list[int]]()
        for field, table in enumerate(self.tables):
            found.setdefault(table, []).append(field)
        return [(table, torch.tensor(found[table])) for table in sorted(found)]

    @cached_property
    def _models(self) -> list[tuple[Any, Tensor]]:
        """The coder's own of each table, with its fields."""
        return [
            (constriction.stream.model.Categorical(table.counts().numpy(), perfect=False), fields)
            for table, fields in self._groups
        ]

    @cached_property
    def _least_bits(self) -> float:
        """Of a token."""
        most = [(table.counts(), len(fields)) for table, fields in self._groups]
        return sum(count * float((own.double().sum() / own.double().amax()).log2()) for own, count in most)


def _of_components(widths: tuple[int, ...], steps: Tensor, errors: Tensor) -> list[Table]:
    """Of a stream's first components, from its tensors `[W, 8]` and `[W, 9]`."""
    found, least = list[Table](), torch.finfo(torch.float64).tiny
    for width, step, error in zip(widths, steps.tolist(), errors.tolist(), strict=False):
        # Of a component that the corpus did not move one table is as good as another.
        octaves = math.log2(step[width - 1] / max(math.sqrt(error[0]), least))
        ratio = round(PER_OCTAVE * min(MOST_OCTAVES, max(-MOST_OCTAVES, octaves)))
        found.append(Table(width, ratio, ((1 << width) - 1) / 2))
    return found


# Errors of the layer before make tokens a little larger than the fit saw them.
SIZES = Table(SIZE_BITS, 0, SIZE_OF_ONE + 1.0)
