"""SpeCache and InfLLM as equations on float64 tensors of one row: what is attended, what is scored, what is chosen."""

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
    """How q.k becomes a logit, and how far back a query sees."""

    scale: float
    softcap: float | None = None
    sliding: int | None = None

    def probabilities(self, query: Tensor, keys: Tensor, first: int, kept: Tensor | None = None) -> Tensor:
        """One softmax a query over everything it sees: `[kv_heads, group, n, T]`.

        `query [heads, n, D]` at the positions `first`, `first` + 1, ...; `keys [kv_heads, T, D]` of the positions 0 ... T - 1, as
        they are met; `kept [kv_heads, T]` where only some of them are.
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
    """Tokens whose keys are encoded in the low-bit copy of a row of `length` tokens, its first `prompt` in one forward.

    `low` are the copy's method and options.
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
    """R of KIVI's copy."""
    given = low.get("residual", 64)
    return given if isinstance(given, int) else given[stream]


def exact(low: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Newest keys and values that KIVI's copy of a row of `length` tokens holds exactly (arXiv:2402.02750, algorithm 1).

    A key until the block of R keys that it belongs to is full: `length` mod R of them. A value until R newer ones have come: R.
    The algorithm encodes a step's value before it attends, so that the R values include the step's own, and R - 1 of those that
    were there before are exact; the released code encodes after it attends, where R are, and the step's own.
    """
    return length - packed(low, length, length), min(length, residual(low, "values"))


def replaced(low: Tensor, exact: Tensor, fetched: Tensor) -> Tensor:
    """`low [kv_heads, T, D]`, but `exact` where a token is `fetched [kv_heads, T]`."""
    return torch.where(fetched[..., None], exact, low)


def token_scores(probabilities: Tensor) -> Tensor:
    """Score of every position: the last query's probability of it, summed over the query heads of a KV head."""
    return probabilities[:, :, -1].sum(1)


# --- InfLLM -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Where a row's tokens are: `initial` ones, blocks of `block`, at least `window` that are local."""

    initial: int
    window: int
    block: int

    def count(self, length: int) -> int:
        """Complete blocks of a row of `length` tokens."""
        return max(0, length - self.initial - self.window) // self.block

    def first_local(self, length: int) -> int:
        """The first position after the last block."""
        return min(length, self.initial) + self.count(length) * self.block

    def of(self, number: int) -> Tensor:
        """The positions of one block."""
        start = self.initial + number * self.block
        return torch.arange(start, start + self.block)

    def met(self, keys: Tensor, stored: int, frequencies: Tensor | None) -> Tensor:
        """`keys [kv_heads, T, D]` after RoPE at the positions where a forward that finds `stored` tokens meets them.

        Tokens of blocks stand at the last position before the local ones, initial tokens end there; None: at their own.
        """
        local = self.first_local(stored)
        if frequencies is None or not self.count(stored):
            return keys
        positions = torch.arange(keys.shape[1])
        moved = torch.where(positions < self.initial, local - 1 - self.initial, local - 1 - positions)
        return rotated(keys, frequencies, torch.where(positions < local, moved, 0)[:, None].double())

    def furthest(self, stored: int, new: int) -> int:
        """The longest distance from a query of a forward of `new` tokens to a token where `met` puts it."""
        local = self.first_local(stored)
        return stored + new - 1 - (local - 1 - self.initial if self.count(stored) else 0)

    def mass(self, probabilities: Tensor, stored: int) -> Tensor:
        """What a forward adds to m_i: `[kv_heads, T]`, of its queries at most `window` positions behind a token."""
        queries, tokens = probabilities.shape[-2:]
        behind = stored + torch.arange(queries)[:, None] - torch.arange(tokens)
        near = (behind >= 1) & (behind <= self.window)
        return (probabilities.sum(1) * near).sum(1)


def block_scores(query: Tensor, representatives: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Score of every block: mean over the group, summed over the queries and over its representatives; `[kv_heads, B]`.

    `query [heads, n, D]`, `representatives [kv_heads, B, r, D]` as they are met. Also the size of an average sum of as many
    terms of that length: what rounding is relative to.
    """
    grouped = query.unflatten(0, (len(representatives), -1)).mean(1)
    logits = torch.einsum("hnd,hbrd->hbnr", grouped, representatives) * scale
    sizes = torch.einsum("hn,hbr->hbnr", grouped.norm(dim=-1), representatives.norm(dim=-1)) * scale
    return logits.sum((2, 3)), sizes.sum((2, 3)) / math.sqrt(logits[0, 0].numel())
