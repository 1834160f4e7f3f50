"""Sparse representation over a dictionary (CSR, arXiv:2412.11741): a vector is a few atoms and their coefficients.

Matching pursuit finds the atoms (eq. 2-4); the pairs (index, coefficient) are stored, and x^ is the sum of coefficients times atoms
(eq. 12). The dictionary has an offline part, trained beforehand and shared by the layers of a group and all their heads,
and may have an online part: atoms that each row sampled from its own prompt.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.matching_pursuit.operation import matching_pursuit
from calib.kernels.matching_pursuit.reference import desparsify, no_pairs, orthogonal_matching_pursuit
from calib.kernels.pack.reference import bytes_per_token, pack_bytes, unpack_bytes
from calib.kernels.to_half import HALF_MAX
from calib.runtime.paging.field import Block, Field
from calib.runtime.paging.stored_values import Indices
from calib.runtime.stages.codec.coefficients import Coefficients
from calib.runtime.stages.contract import Codec, Segment
from calib.runtime.stages.seeded_rng import SeededRng
from calib.runtime.stages.shared_table import SharedTable

Index = Literal["packed", "int16"]
MOST_ATOMS = 2**16


@dataclass(frozen=True, eq=False)
class Sparse(Codec):
    """`sparsity` pairs for each of the `chunks` equal parts of a token's channels.

    Args:
        sparsity: s, pairs of a vector; at most its channels.
        chunks: s_n, vectors of a token and head.
        offline: atoms `[N, D / chunks]` float16, about unit vectors, or None.
        columns: M, atoms of the online part.
        coefficients: storage format of the coefficients.
        index: "packed" in ceil(log2(N + M)) bits, or "int16" as in the paper.
        orthogonal: refits all coefficients after every step (orthogonal matching pursuit): the same storage, a lower error.
        online: the online atoms of the rows, `[rows, M, D / chunks]` float16; set by `bound`.
        reverse: share of the online atoms that are sampled in reverse (`sampled`), 0 ... 1.
    """

    sparsity: int
    chunks: int = 1
    offline: SharedTable | None = None
    columns: int = 0
    coefficients: Coefficients = field(default_factory=Coefficients)
    index: Index = "packed"
    orthogonal: bool = False
    online: Tensor | None = None
    reverse: float = 0.5

    has_kernel = True
    row_by_row = True
    onnx_writer: ClassVar[str | None] = "pairs"

    @property
    def joins_heads(self) -> bool:
        """A row's atoms are sampled from all of its heads."""
        return self.columns > 0

    @property
    def sampling(self) -> "Sparse | None":
        """Itself, where it has an online part."""
        return self if self.columns else None

    @property
    def pairs(self) -> int:
        """Pairs of a token and head."""
        return self.sparsity * self.chunks

    @property
    def atoms(self) -> int:
        """N + M."""
        return self.columns + (0 if self.offline is None else len(self.offline.tensor))

    @property
    def _index_bits(self) -> int:
        return max(1, (self.atoms - 1).bit_length())

    def token_group(self) -> int:
        """1: tokens are encoded independently."""
        return 1

    def fields(
        self, head_dim: int, dtype: torch.dtype, fp32_params: bool = False, segment: Segment | None = None
    ) -> dict[str, Field]:
        """`indices` and `coefficients`, with integer coefficients `scale`."""
        if head_dim % self.chunks:
            raise ValueError(f"{self.chunks} chunks do not divide {head_dim} channels; use a divisor")
        width = head_dim // self.chunks
        if self.sparsity > width:
            raise ValueError(f"sparsity: {self.sparsity} pairs for a vector of {width} channels; use at most {width}")
        if self.offline is not None and self.offline.tensor.shape[1] != width:
            raise ValueError(
                f"the artifact's dictionary has atoms of {self.offline.tensor.shape[1]} channels, and vectors have {width}; "
                "fit again"
            )
        if not 1 <= self.atoms <= MOST_ATOMS:
            raise ValueError(
                f"a dictionary has 1 ... {MOST_ATOMS} atoms (16-bit indices), got {self.atoms} with online={self.columns}; "
                f"use online of at most {MOST_ATOMS - self.atoms + self.columns}"
            )
        if self.index == "int16":
            indices = Field(1, self.pairs, torch.int16, "codes", values=Indices(self.atoms))
        else:
            values = Indices(self.atoms, self._index_bits, self.pairs)
            indices = Field(1, bytes_per_token(self.pairs, self._index_bits), torch.uint8, "codes", values=values)
        return {"indices": indices} | self.coefficients.fields(self.pairs, fp32_params)

    def fp32_params(self, x: Tensor) -> bool:
        """Whether a coefficient, at most a vector's norm, could overflow float16."""
        if not x.numel() or x.is_meta:  # a meta tensor has no values to ask for
            return False
        return bool(x.float().norm(dim=-1).max() > HALF_MAX)

    def encode(self, x: Tensor, fp32_params: bool | None = None) -> Block:
        """`x [batch, kv_heads, tokens, D]` -> block; with an online part its rows are those of `online`."""
        fp32_params = self.fp32_params(x) if fp32_params is None else fp32_params
        # Row by row: how products are rounded must not depend on the other rows.
        rows = [self._encode(tokens, number, fp32_params) for number, tokens in enumerate(x.float().split(1))]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _encode(self, x: Tensor, row: int, fp32_params: bool) -> Block:
        vectors = self._vectors(x)
        index, coefficients = self._pursue(vectors, self._table(row))
        index, coefficients = (part.view(*x.shape[:3], self.pairs) for part in (index, coefficients))
        packed = index.to(torch.int16) if self.index == "int16" else pack_bytes(index, self._index_bits)
        return {"indices": packed} | dict(self.coefficients.encode(coefficients, fp32_params))

    def decode(self, block: Block, channels: int) -> Tensor:
        """x^, float32 `[..., kv_heads, tokens, channels]`; eq. 12."""
        index = block["indices"]
        index = index.int() & 0xFFFF if self.index == "int16" else unpack_bytes(index, self._index_bits, self.pairs)
        coefficients = self.coefficients.decode(block, self.pairs)
        if self.online is not None and len(self.online) > 1:  # each row has atoms of its own after the offline ones
            first = self.atoms - self.columns
            row = torch.arange(len(self.online), dtype=torch.int32, device=index.device)[:, None, None, None]
            index = torch.where(index >= first, index + row * self.columns, index)
        index, coefficients = (part.unflatten(-1, (self.chunks, self.sparsity)) for part in (index, coefficients))
        return desparsify(index, coefficients, self._table(None)).flatten(-2)

    def error_bound(self, x: Tensor) -> Tensor:
        """The vector's norm, because the residual's norm never grows (the rounding of coefficients is not counted)."""
        vectors = x.float().unflatten(-1, (self.chunks, -1))
        return vectors.norm(dim=-1, keepdim=True).expand_as(vectors).flatten(-2)

    def scores(self, query: Tensor, tile: Block) -> Tensor:
        """q.x^ of a tile of keys."""
        return query @ self.decode(tokens_first(tile), query.shape[-1]).mT

    def mix(self, weights: Tensor, tile: Block, channels: int) -> Tensor:
        """The weighted sum of a tile of values."""
        return weights @ self.decode(tokens_first(tile), channels)

    def sampled(self, x: Tensor, rng: SeededRng) -> Tensor:
        """The online part of a row from `x [1, kv_heads, T, D]`: float16 `[M, D / chunks]`, unit vectors, then zeros.

        Uniform sampling draws from all vectors alike. Reverse sampling takes those of the other vectors that the offline atoms
        represent worst; without offline atoms, those that the drawn ones do; without these too, the longest ones.
        """
        vectors = self._vectors(x.float().transpose(1, 2))
        size = min(self.columns, len(vectors))
        reverse = math.floor(self.reverse * size + 1e-9)  # 0.29 of 100 is 28.999999999999996
        drawn = rng.at(torch.arange(len(vectors), device=x.device)).argsort(stable=True)
        uniform, rest = drawn[: size - reverse], drawn[size - reverse :].sort().values
        known = _unit(vectors[uniform]).half() if self.offline is None else self.offline.tensor
        known = known.float()
        missing = vectors[rest]
        if reverse and len(known):
            missing = missing - desparsify(*self._pursue(missing, known), known)
        worst = missing.square().sum(-1).argsort(descending=True, stable=True)[:reverse]
        atoms = x.new_zeros(self.columns, vectors.shape[-1], dtype=torch.float16)
        atoms[:size] = _unit(vectors[torch.cat([uniform, rest[worst]])]).half()
        return atoms

    def bound(self, online: Tensor | None) -> "Sparse":
        """Returns the codec for rows whose online atoms are `online [rows, M, D / chunks]`."""
        return replace(self, online=online)

    def sparse_pages(self, pages: Block) -> SparsePages:
        """The pairs and the atoms that their indices refer to."""
        form = self.coefficients.form
        return SparsePages(
            pages["indices"],
            pages["coefficients"],
            self.sparsity,
            self.chunks,
            None if self.offline is None else self.offline.tensor,
            self.online,
            form if isinstance(form, int) else None,
            pages.get("scale"),
        )

    def _pursue(self, vectors: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
        if vectors.is_meta:  # no numbers: any pairs
            return no_pairs(vectors, self.sparsity)
        pursuit = orthogonal_matching_pursuit if self.orthogonal else matching_pursuit
        return pursuit(vectors, atoms, self.sparsity)

    def _vectors(self, x: Tensor) -> Tensor:
        """`x [..., D]` -> vectors `[n, D / chunks]`, n running over all tokens and chunks."""
        return x.reshape(-1, x.shape[-1] // self.chunks)

    def _table(self, row: int | None) -> Tensor:
        """Atoms in float32: the offline ones, then those of a row, or of every row."""
        parts = [] if self.offline is None else [self.offline.tensor]
        if self.online is not None:
            parts.append(self.online.flatten(0, 1) if row is None else self.online[row])
        return torch.cat(parts).float() if len(parts) > 1 else parts[0].float()


def tokens_first(tile: Block) -> Block:
    """A tile, tokens last, as a block, tokens before width."""
    return {name: part.mT for name, part in tile.items()}


def _unit(vectors: Tensor) -> Tensor:
    norm = vectors.norm(dim=-1, keepdim=True)
    return torch.where(norm > 0, vectors / norm, vectors)
