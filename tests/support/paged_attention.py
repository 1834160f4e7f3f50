"""Pages of random codes and their decoded tokens, and attention over them, in float64 from the formats' description alone.

R is the query rows of a KV head (query heads x columns), D the channels, slots the token slots of a row's pages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.attend.operation import EXACT, Attended, PackedStream, PageSpan
from calib.kernels.pack.reference import pack

EXACT_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Kind:
    """How keys or values are stored: the `bits` of a code, or the dtype of exact tokens; and the groups of their parameters:
    "fixed" (none), "token" for groups of `size` channels of a token, or "channel" for groups of `size` tokens of a channel."""

    bits: int | str
    parameters: str = ""
    size: int = 1

    def __str__(self) -> str:
        return f"{self.bits}-{self.parameters}-{self.size}".replace("fixed-1", "fixed").removesuffix("--1")


@dataclass(frozen=True)
class Pages:
    """A stream in the form that kernels take, and its decoded tokens in float64 `[pages, kv_heads, page_tokens, D]`."""

    stream: PackedStream
    tokens: Tensor


def pages_of(
    kind: Kind,
    shape: tuple[int, int, int, int],
    seed: int,
    scale: float = 1.0,
    shared: bool = False,
    steady: bool = False,
    scaled: bool = False,
) -> Pages:
    """Random pages whose tokens are `scale` times numbers of order 1; with `shared`, all heads have the same parameters.

    Steps of groups differ by a factor of up to 40; with `steady`, of up to 2. With `scaled`, the channels of each page also have
    scales, one of them 0.
    """
    draw = torch.Generator().manual_seed(seed)
    count, heads, page, channels = shape
    if isinstance(kind.bits, str):
        exact = (torch.randn(shape, generator=draw) * scale).to(EXACT_TYPES[kind.bits])
        return Pages(PackedStream(EXACT, exact, channels), exact.double())
    codes = torch.randint(0, 2**kind.bits, shape, generator=draw)
    words, levels = pack(codes, kind.bits), 2**kind.bits - 1
    own = 1 if shared else heads
    groups = {"fixed": (1, 1), "token": (page, kind.size), "channel": (page // kind.size, channels)}[kind.parameters]
    across = (own, 1, 1) if kind.parameters == "fixed" else (count, own, *groups)
    spread = torch.rand(across, generator=draw)
    steps = (1.5 * scale / levels) * (1 + spread if steady else 2.0 ** (5.3 * spread - 3.3))
    zeros = steps * levels * (torch.rand(across, generator=draw) * 0.4 - 0.7)
    if kind.parameters == "fixed":
        tokens = codes * steps.double() + zeros.double()
        return Pages(PackedStream(kind.bits, words, channels, fixed=(steps, zeros)), tokens)
    steps, zeros = steps.half(), zeros.half()
    repeats = (1, channels // kind.size) if kind.parameters == "token" else (kind.size, 1)
    s, z = (
        part.double().repeat_interleave(repeats[0], -2).repeat_interleave(repeats[1], -1) for part in (steps, zeros)
    )
    group_tokens = 1 if kind.parameters == "token" else kind.size
    stream = PackedStream(kind.bits, words, channels, torch.cat([steps, zeros], -1), group_tokens)
    if not scaled:
        return Pages(stream, codes * s + z)
    scales = (0.5 + torch.rand(count, heads, 1, channels, generator=draw)).half()
    scales[..., -1] = 0
    return Pages(replace(stream, scales=scales), (codes * s + z) * scales.double())


@dataclass(frozen=True)
class Expected:
    """Attention in float64: `scores [rows, kv_heads, R, slots]`, -inf for masked slots; `normaliser`, their log-sum-exp `[..., R,
    1]`; `output [..., R, D]`, 0 if all slots are masked; `terms [..., R, 1]`, the largest sum of magnitudes of a score's terms."""

    scores: Tensor
    normaliser: Tensor
    output: Tensor
    terms: Tensor


def of_rows(pages: Tensor, table: Tensor) -> Tensor:
    """Gather pages `[pages, kv_heads, page_tokens, n]` by the rows' page tables: `[rows, kv_heads, slots, n]`."""
    return pages[table.long()].transpose(1, 2).flatten(2, 3)


def attention(
    query: Tensor,
    keys: Pages,
    values: Pages,
    span: PageSpan,
    constant: Tensor | None = None,
    softcap: float | None = None,
    rotated: Callable[[Tensor], Tensor] | None = None,
) -> Expected:
    """Softmax attention in float64 over the slots of `span`; query rows are ordered by query head, then by column. `rotated`
    applies RoPE to the keys of all slots."""
    k, v = (of_rows(pages.tokens, span.table) for pages in (keys, values))
    k = k if rotated is None else rotated(k)
    scores, slots = query.double() @ k.mT, torch.arange(k.shape[2])
    terms = query.double().abs() @ k.abs().mT
    for added in (constant, span.bias):
        if added is not None:
            scores = scores + added.double()
            terms = terms + added.double().abs()
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    unseen = (slots >= span.used.view(-1, 1, 1, 1)).expand(scores.shape)
    if span.hidden is not None:
        unseen = unseen | span.hidden.unsqueeze(2)
    if span.back is not None:
        columns = span.back.shape[1]
        back = span.back.repeat(1, query.shape[2] // columns)[:, None, :, None]
        position = slots if span.positions is None else of_rows(span.positions, span.table).mT
        unseen = unseen | (position <= back)
    scores = scores.masked_fill(unseen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return Expected(scores, scores.logsumexp(-1, keepdim=True), weights @ v, terms.amax(-1, keepdim=True))


def assert_attended(found: Attended, expected: Expected, values: Tensor, of_scores: float, of_output: float) -> None:
    """Assert that scores and log-sum-exp differ by at most `of_scores` x the magnitudes of their terms, and the output by at most
    (`of_output` + `of_scores` x terms) x the largest value; that all is finite, and 0 for query rows whose slots are all masked."""
    if found.scores is not None:
        assert torch.equal(found.scores == -torch.inf, expected.scores == -torch.inf)
        seen = expected.scores > -torch.inf
        wrong = ((found.scores.double() - expected.scores) / expected.terms).abs()[seen]
        assert (wrong <= of_scores).all(), wrong.amax()
    met = expected.normaliser > -torch.inf
    assert found.top.isfinite().all() and found.mass.isfinite().all() and found.mixed.isfinite().all()
    assert (found.mass[~met] == 0).all() and (found.mixed * ~met == 0).all()
    top = expected.scores.amax(-1, keepdim=True)
    normaliser = found.top.double() + found.mass.double().log()
    for got, want in ((found.top.double(), top), (normaliser, expected.normaliser)):
        wrong = ((got - want).abs() / expected.terms)[met]
        assert (wrong <= of_scores).all(), wrong.amax()
    output = found.mixed.double() / found.mass.double().clamp_min(torch.finfo(torch.float32).tiny)
    wrong = (output - expected.output).abs().amax(-1, keepdim=True) / values.abs().amax() - of_scores * expected.terms
    assert (wrong <= of_output).all(), wrong.amax()
