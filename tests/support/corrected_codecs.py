"""Codecs with every correction around them, tokens for them, and a comparison of attention over their fields with float64."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import oracle
import torch
from gear.samples import real_like
from hypothesis import settings
from hypothesis import strategies as st
from law_examples import examples
from tolerances import FLOAT32_ATTENTION

from calib.runtime.paging.field import Block
from calib.runtime.stages.codec import Corrected, Exact, UniformQuant
from calib.runtime.stages.codec.corrected import OVERFLOWED, counted, counter, segment_mix, segment_scores
from calib.runtime.stages.contract import Codec, Segment
from calib.runtime.stages.correction import LowRank, Outliers

HEADS, CHANNELS, BASIS = 2, 16, 6
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = [(1, None), (1, 8), (8, 1), (4, 4), (None, 1), (None, None), (2, 16), None]
ACROSS = [(1, None), (4, None), (None, None)]
KINDS = ("normal", "real", "dead channels", "constant", "zero", "steps", "offset", "tiny", "one large", "near the end")
law = settings(derandomize=True, deadline=None, max_examples=examples(300))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(kind: str, batch: int, count: int, seed: int) -> torch.Tensor:
    """Random tokens `[batch, HEADS, count, CHANNELS]`, float32, of one of KINDS."""
    x = randn(batch, HEADS, count, CHANNELS, seed=seed)
    if kind == "real":
        x = torch.from_numpy(np.stack([real_like(tuple(x.shape[1:]), 10 * seed + row) for row in range(batch)]))
    elif kind == "dead channels":
        x[..., 3], x[..., 4], x[:, -1, :, 7] = 0, 1.5, -0.25
    elif kind == "constant":
        x = torch.full_like(x, 1.5)
    elif kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "steps":
        x = (x * 2).round() / 4
    elif kind == "offset":
        x = x * 0.01 + 40
    elif kind == "tiny":
        x = x * 1e-6
    elif kind == "one large":
        x[:, 0, count // 2, 5] = 300
    elif kind == "near the end":
        x = (x * 2e4).clamp(-65504, 65504)
    return x


def backbones(count: int) -> list[Codec]:
    """Every inner codec that can encode `count` tokens."""
    across = [UniformQuant(3, group, across_heads=True) for group in ACROSS]
    codecs = [*(UniformQuant(bits, group) for bits in (1, 2, 4) for group in GROUPS), *across]
    codecs.append(UniformQuant(2, None, torch.tensor([0.8, 2.5])[:, None, None]))
    return [Exact()] + [codec for codec in codecs if count % codec.token_group() == 0]


SHARES = (0.001, 0.02, 0.1, 0.5, 1.0)
FORMS = [("tokens", False), ("channels", False), ("channels", True), ("matrix", True)]


def thresholds(ranked: str, across: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outlier thresholds (low, high) in the shape in which an artifact has them for such rows."""
    shape = (1, 1, 1) if across else (HEADS, 1, CHANNELS) if ranked == "tokens" else (HEADS, 1, 1)
    return -0.9 - randn(*shape, seed=1).abs() / 3, 0.8 + randn(*shape, seed=2).abs() / 3


def all_outliers(share: float, of_rows: bool = True) -> list[Outliers | None]:
    """None, and every form of outliers, ranked and with thresholds; with `of_rows` also those whose lists are of a row."""
    forms: list[Outliers | None] = [None]
    for ranked, across in FORMS:
        fill = "zero" if ranked == "matrix" else "mean"
        forms += [Outliers(share, ranked, across, fill, *ends) for ends in ((), thresholds(ranked, across))]
    rows = [replace(form, of_row=True) for form in forms if form is not None and form.ranked != "matrix"]
    return forms + rows if of_rows else forms


def all_low_ranks(rank: float | int) -> list[LowRank | None]:
    """None, factors of each head and across heads, and for a whole rank a calibrated basis."""
    basis = torch.linalg.qr(randn(HEADS, CHANNELS, BASIS, seed=7)).Q.mT.contiguous()
    known = [LowRank(min(rank, BASIS), basis=basis)] if isinstance(rank, int) else []
    return [None, LowRank(rank), LowRank(rank, across_heads=True), *known]


class Problem(NamedTuple):
    """A corrected codec, tokens for it, and both in words for hypothesis's report."""

    codec: Corrected
    x: torch.Tensor
    words: str

    def __repr__(self) -> str:
        return self.words


@st.composite
def problems(draw, plain: bool = False, of_rows: bool = True):
    count = draw(st.sampled_from([1, 2, 3, 8, 20, 40]))
    codec = draw(st.sampled_from(backbones(count)))
    outliers = draw(st.sampled_from(all_outliers(draw(st.sampled_from(SHARES)), of_rows)))
    low_rank = draw(st.sampled_from(all_low_ranks(draw(st.sampled_from([1, 2, 4, 50, 0.02, 0.3, 1.0])))))
    kind = draw(st.sampled_from([kind for kind in KINDS if not plain or kind != "near the end"]))
    dtype = draw(st.sampled_from(DTYPES))
    batch, seed = draw(st.integers(1, 3)), draw(st.integers(0, 99))
    found = outliers and (
        outliers.share,
        outliers.ranked,
        outliers.across_heads,
        outliers.low is not None,
        outliers.of_row,
    )
    factors = low_rank and (low_rank.rank, low_rank.across_heads, low_rank.basis is not None)
    words = f"{codec}, outliers {found}, low rank {factors}, {batch} x {count} tokens, {kind}, {dtype}, seed {seed}"
    return Problem(Corrected(codec, outliers, low_rank), tokens(kind, batch, count, seed).to(dtype), words)


def encoded(codec: Corrected, x: torch.Tensor, fp32_params: bool | None = None) -> Block:
    """The encoded block without its count of overflowed outliers, as a tier stores it."""
    block = codec.encode(x, fp32_params)
    return counted(block, counter(codec, x.device))


def segment(x: torch.Tensor) -> Segment:
    return Segment(x.shape[1], x.shape[2])


def as_stored(codec: Corrected, block: Block, x: torch.Tensor, fp32_params: bool) -> dict[str, torch.Tensor]:
    """The fields of a block in the dtypes in which they are stored."""
    fields = codec.fields(x.shape[-1], x.dtype, fp32_params, segment(x))
    assert set(fields) == {name for name in block if name != OVERFLOWED}
    return {name: block[name].to(field.dtype) for name, field in fields.items()}


def backbone_alone(codec: Corrected, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens with outliers replaced (as the inner codec gets them), the mask of outliers, and the inner codec's decoding."""
    filled, mask = [], []
    for row in x.float().split(1):
        found = None if codec.outliers is None else codec.outliers.find(row)
        filled.append(row if found is None else codec.outliers.filled(row, found))
        ones = torch.ones_like(row)
        mask.append(torch.zeros_like(row) if found is None else ones - codec.outliers.cleared(ones, found))
    whole = torch.cat(filled)
    return (
        whole,
        torch.cat(mask).bool(),
        codec.codec.decode(codec.codec.encode(whole, codec.fp32_params(x)), x.shape[-1]),
    )


def attended(
    codec: Corrected, query: torch.Tensor, weights: torch.Tensor, tile: Block, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `q K^T` and mixtures `p V` from a tile, including outlier lists of segments."""
    scores, mixed = codec.scores(query, tile), codec.mix(weights, tile, query.shape[-1])
    listed = segment_scores(codec, query, tile, count), segment_mix(codec, weights, tile, query.shape[-1])
    found = [part if more is None else part + more for part, more in zip((scores, mixed), listed, strict=True)]
    return found[0], found[1]


def by_entry(codec: Corrected, block: Block, channels: int) -> torch.Tensor:
    """x^ of every row in float64 by the oracle, which adds corrections one entry at a time."""
    rows = range(len(next(iter(block.values()))))
    return torch.stack(
        [oracle.decoded(codec, {name: part[row] for name, part in block.items()}, channels) for row in rows]
    )


def check_attention(codec: Corrected, block: Block, tile: Block, shape: torch.Size) -> None:
    """Assert that logits and mixtures from a tile, and `decode`, agree with the oracle's decoded tokens in float64, to
    FLOAT32_ATTENTION of the largest part."""
    rows, heads, count, channels = shape
    whole = by_entry(codec, block, channels)
    decoded = codec.decode(block, channels)
    parts = [codec.codec.decode(block, channels).abs().max(), decoded.abs().max()]
    parts += [part.float().abs().max() for name, part in block.items() if "delta" in name and part.numel()]
    if codec.low_rank is not None:
        parts.append(block["low_rank.coefficients"].float().abs().max() * 4)
    size = float(max(parts))
    assert (decoded - whole).abs().max() <= FLOAT32_ATTENTION * size
    query, weights = randn(rows, heads, 3, channels, seed=1), randn(rows, heads, 3, count, seed=2).softmax(-1)
    scores, mixed = attended(codec, query, weights, tile, count)
    for found, expected, scale in (
        (scores, query.double() @ whole.mT, channels),
        (mixed, weights.double() @ whole, 1),
    ):
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert (found - expected).abs().max() <= FLOAT32_ATTENTION * size * scale
