"""The equations of SpeCache and InfLLM on float64 tensors of one row: attended tokens, scores, blocks.

n is queries, T tokens, D head_dim, B blocks, r the representatives of a block.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from csr.spec import Spec as CsrSpec
from oracle import rotated
from torch import Tensor


@dataclass(frozen=True)
class Attending:
    """The model's scale and soft cap of logits, and its sliding window."""

    scale: float
    softcap: float | None = None
    sliding: int | None = None

    def probabilities(self, query: Tensor, keys: Tensor, first: int, kept: Tensor | None = None) -> Tensor:
        """Causal attention probabilities `[kv_heads, group, n, T]`.

        `query [heads, n, D]` is at the positions `first`, `first` + 1, ...; `keys [kv_heads, T, D]` are those of the positions
        0 ... T - 1; `kept`, bool `[kv_heads, T]`, masks keys.
        """
        grouped = query.unflatten(0, (len(keys), -1))
        logits = grouped @ keys[:, None].mT * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        at, positions = first + torch.arange(query.shape[1])[:, None], torch.arange(keys.shape[1])
        seen = positions <= at
        if self.sliding is not None:
            seen &= positions > at - self.sliding
        seen = seen if kept is None else seen & kept[:, None, None]
        return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def mixed(probabilities: Tensor, values: Tensor) -> Tensor:
    """Outputs `[heads, n, D]` of `probabilities [kv_heads, group, n, T]` and `values [kv_heads, T, D]`."""
    return (probabilities @ values[:, None]).flatten(0, 1)


# --- SpeCache ---------------------------------------------------------------------------------------------------------


def packed(low: Mapping[str, Any], prompt: int, length: int) -> int:
    """Number of tokens whose keys are encoded in the low-bit copy of a row of `length` tokens, of which `prompt` came in one
    forward.

    `low` has the method and options of the copy.
    """
    match low["method"]:
        case "rtn":
            return length
        case "kivi":
            return length - length % residual(low, "keys")
        case "csr" if "tiers" not in low:
            spans = CsrSpec(window=low.get("window", 64), block=low.get("block", 16)).spans(prompt, length)
            return spans[-1][1] if spans else 0
        case "csr" | "zipcache" | "gear" | "uniform":
            usual = {"csr": ("block", 100), "zipcache": ("recompress", 100)}.get(low["method"], ("block", 20))
            block, grain = low.get(*usual), 1
            if low.get("backbone") == "kivi":  # keys in whole groups
                block, grain = low.get("block", 64), low.get("group", 64)
            first = max(prompt // grain * grain, block)
            return 0 if length < first else first + (length - first) // block * block
    raise AssertionError(low)


def residual(low: Mapping[str, Any], stream: str) -> int:
    """KIVI's residual length R of a stream of the low-bit copy."""
    given = low.get("residual", 64)
    return given if isinstance(given, int) else given[stream]


def exact(low: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Numbers of the newest keys and values that KIVI keeps exactly in a row of `length` tokens (arXiv:2402.02750, algorithm 1).

    A key is exact until its block of R keys is full, so `length` mod R are. A value is exact until there are R newer ones, so R
    are. In a decode step the algorithm encodes before attention, so the R exact values include the step's own; the released code
    encodes after attention, with R exact values besides the step's own.
    """
    return length - packed(low, length, length), min(length, residual(low, "values"))


def replaced(low: Tensor, exact: Tensor, fetched: Tensor) -> Tensor:
    """`low [kv_heads, T, D]` with the tokens in the mask `fetched [kv_heads, T]` replaced by `exact`."""
    return torch.where(fetched[..., None], exact, low)


def token_scores(probabilities: Tensor) -> Tensor:
    """Score of every position `[kv_heads, T]`: its attention probability under the last query, summed over the query heads of a KV
    head.
    """
    return probabilities[:, :, -1].sum(1)


# --- InfLLM -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The division of a row: `initial` tokens, complete blocks of `block` tokens, and at least `window` local tokens."""

    initial: int
    window: int
    block: int

    def count(self, length: int) -> int:
        """Number of complete blocks of a row of `length` tokens."""
        return max(0, length - self.initial - self.window) // self.block

    def first_local(self, length: int) -> int:
        """The first position after the last block."""
        return min(length, self.initial) + self.count(length) * self.block

    def of(self, number: int) -> Tensor:
        """The positions of one block."""
        start = self.initial + number * self.block
        return torch.arange(start, start + self.block)

    def met(self, keys: Tensor, stored: int, frequencies: Tensor | None) -> Tensor:
        """`keys [kv_heads, T, D]` rotated to the positions at which a forward after `stored` tokens attends to them.

        All tokens of blocks get the last position before the local tokens, and the initial tokens the positions that end there.
        Without `frequencies` (or blocks) all keep their own.
        """
        local = self.first_local(stored)
        if frequencies is None or not self.count(stored):
            return keys
        positions = torch.arange(keys.shape[1])
        moved = torch.where(positions < self.initial, local - 1 - self.initial, local - 1 - positions)
        return rotated(keys, frequencies, torch.where(positions < local, moved, 0)[:, None].double())

    def furthest(self, stored: int, new: int) -> int:
        """The longest distance from a query of a forward of `new` tokens to a token, at the positions of `met`."""
        local = self.first_local(stored)
        return stored + new - 1 - (local - 1 - self.initial if self.count(stored) else 0)

    def mass(self, probabilities: Tensor, stored: int) -> Tensor:
        """The contribution of a forward to m, `[kv_heads, T]`: attention of queries 1 ... `window` positions after a token."""
        queries, tokens = probabilities.shape[-2:]
        behind = stored + torch.arange(queries)[:, None] - torch.arange(tokens)
        near = (behind >= 1) & (behind <= self.window)
        return (probabilities.sum(1) * near).sum(1)


def block_scores(query: Tensor, representatives: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scores of all blocks `[kv_heads, B]`: logits, mean over the query heads of a KV head, summed over queries and
    representatives.

    `query [heads, n, D]`, `representatives [kv_heads, B, r, D]` at their attended positions. Also returns, in the same shape, the
    magnitude to which rounding is relative: the sum of |q| |k| over the root of the number of terms.
    """
    grouped = query.unflatten(0, (len(representatives), -1)).mean(1)
    logits = torch.einsum("hnd,hbrd->hbnr", grouped, representatives) * scale
    sizes = torch.einsum("hn,hbr->hbnr", grouped.norm(dim=-1), representatives.norm(dim=-1)) * scale
    return logits.sum((2, 3)), sizes.sum((2, 3)) / math.sqrt(logits[0, 0].numel())
