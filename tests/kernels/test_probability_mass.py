"""Attention probabilities summed over query rows, from scores and log-sum-exp: plain torch and the interpreted kernel, against
float64."""

import pytest
import torch
from launches import counts, watch
from tolerances import FLOAT32_ATTENTION

from calib.kernels.probability_mass.operation import (
    ScoredTokens,
    add_mass_by_position,
    mass_by_position,
    probability_mass,
)

pytestmark = pytest.mark.arithmetic


def scored(rows, heads, asked, tokens, columns):
    """Spans of scores, with masked tokens, their log-sum-exp, and the mass of each token in float64."""
    generator = torch.Generator().manual_seed(asked)
    spans, masses = [], []
    for number, count in enumerate(tokens):
        scores = torch.randn(rows, heads, asked, count + 3, generator=generator)[..., 2 : 2 + count]
        scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.2, -torch.inf) * 3
        weights = None
        if columns and number != 1:
            weights = torch.rand(rows, columns, count if number else 1, generator=generator)
        spans.append(ScoredTokens(scores, weights))
    every = torch.cat([span.scores for span in spans], -1).double()
    normaliser = every.logsumexp(-1, keepdim=True)
    for span in spans:
        shares = (span.scores.double() - normaliser).exp()
        if span.weights is not None:
            of_rows = span.weights.double()[:, None].repeat(1, 1, asked // columns, 1)
            shares = shares * of_rows
        masses.append(shares.sum(2))
    return spans, normaliser.float(), masses


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize(
    ("asked", "tokens", "columns"),
    [(1, (9,), 0), (4, (300, 1), 0), (6, (20, 7, 2), 3), (40, (258, 0, 5), 10), (3, (4, 5, 6, 7, 8), 1)],
)
def test_mass_of_spans(form, asked, tokens, columns, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", form)
    spans, normaliser, expected = scored(2, 3, asked, tokens, columns)
    launched = watch(monkeypatch, "probability_mass")
    found = probability_mass(spans, normaliser)
    assert counts(launched) == ({"sum_rows": -(-sum(n > 0 for n in tokens) // 4)} if form == "triton" else {})
    for own, exact in zip(found, expected, strict=True):
        assert own.dtype == torch.float32 and own.shape == exact.shape
        assert not own.numel() or (own.double() - exact).abs().max() <= 4 * FLOAT32_ATTENTION * max(1, exact.max())


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_rows_whose_query_counts_by_a_byte(form, monkeypatch):
    """Weights of 1 or 0 as uint8, one for all tokens of a row, as in a recorded decode step: the same bits as with float32
    weights."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    spans, normaliser, _ = scored(3, 2, 4, (40, 1), 0)
    counts = torch.tensor([1, 0, 1], dtype=torch.uint8)[:, None, None]
    found, expected = (
        probability_mass(
            [ScoredTokens(span.scores, of_row.expand(-1, -1, span.scores.shape[-1])) for span in spans], normaliser
        )
        for of_row in (counts, counts.float())
    )
    assert all(torch.equal(one, other) and one[0].any() for one, other in zip(found, expected, strict=True))
    assert not any(part[1].any() for part in found)


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_some_rows_of_a_query(form, monkeypatch):
    """Scores and normalisers may be views, here the query rows of the newest column. A row has the same bits alone and in a
    batch."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    spans, normaliser, _ = scored(2, 3, 8, (40, 5), 0)
    newest = [part.unflatten(2, (4, 2))[:, :, :, -1] for part in (*(span.scores for span in spans), normaliser)]
    *found, normaliser = newest
    together = probability_mass([ScoredTokens(part) for part in found], normaliser)
    apart = probability_mass([ScoredTokens(part[1:].contiguous()) for part in found], normaliser[1:].contiguous())
    for one, other, part in zip(together, apart, found, strict=True):
        assert torch.equal(one[1:], other)
        exact = (part.double() - normaliser.double()).exp().sum(2)
        assert (one.double() - exact).abs().max() <= 4 * FLOAT32_ATTENTION


def numbered(rows: int, heads: int, asked: int, kinds: tuple[torch.dtype | None, ...]):
    """Spans of 290 tokens. For a row and head, each position has at most one token that any query row sees. Tokens that are masked
    for all may have any position, also one of another token, or 2^30."""
    draw = torch.Generator().manual_seed(asked)
    reach, owner = 300, torch.randint(0, len(kinds) + 1, (rows, heads, 300), generator=draw)
    spans = []
    for number, kind in enumerate(kinds):
        at = torch.stack([torch.randperm(reach, generator=draw)[:290] for _ in range(rows * heads)]).view(
            rows, heads, 290
        )
        if kind is None:
            at = torch.arange(7, 297).expand(rows, heads, -1)
        scores = 3 * torch.randn(rows, heads, asked, 290, generator=draw)
        hidden = (owner.gather(2, at) != number)[:, :, None]
        some = torch.rand(scores.shape, generator=draw) < 0.1
        some[:, :, 0] = False  # at least the first query row sees it
        scores = scores.masked_fill(hidden | some, -torch.inf)
        positions = 7 if kind is None else at.masked_fill(hidden[:, :, 0], number).to(kind)
        if kind is not None:
            positions[hidden[:, :, 0] & (at % 5 == 0)] = 2**30
        spans.append(ScoredTokens(scores, positions=positions))
    return spans, reach


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize(
    ("asked", "kinds"), [(1, (None,)), (4, (None, torch.int64, torch.int32)), (18, (torch.int32,) * 5)]
)
def test_mass_by_position(form, asked, kinds, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", form)
    spans, reach = numbered(2, 3, asked, kinds)
    normaliser = torch.cat([span.scores for span in spans], -1).double().logsumexp(-1, keepdim=True)
    launched = watch(monkeypatch, "probability_mass")
    found = mass_by_position(spans, normaliser.float(), reach)
    assert counts(launched) == ({"sum_rows": -(-len(kinds) // 4)} if form == "triton" else {})
    assert found.shape == (2, 3, reach) and found.dtype == torch.float32
    expected, met = torch.zeros(2, 3, reach, dtype=torch.float64), torch.zeros(2, 3, reach, dtype=torch.bool)
    for span in spans:
        masses = (span.scores.double() - normaliser).exp().sum(2)
        seen = (span.scores > -torch.inf).any(2)
        for row, head, token in seen.nonzero().tolist():
            at = span.positions + token if isinstance(span.positions, int) else int(span.positions[row, head, token])
            assert not met[row, head, at]
            expected[row, head, at], met[row, head, at] = masses[row, head, token], True
    assert met.any() and not met.all()
    assert (found.double() - expected)[met].abs().max() <= 4 * FLOAT32_ATTENTION * max(1, expected.max())


def test_positions_that_all_heads_share(monkeypatch):
    """Positions of a row without an axis of heads. A row has the same bits alone and in a batch."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    draw = torch.Generator().manual_seed(1)
    positions = torch.stack([torch.randperm(40, generator=draw) for _ in range(2)])[:, None]
    scores = torch.randn(2, 3, 8, 40, generator=draw)
    normaliser = scores.logsumexp(-1, keepdim=True)
    found = mass_by_position([ScoredTokens(scores, positions=positions)], normaliser, 40)
    (plain,) = probability_mass([ScoredTokens(scores)], normaliser)
    assert torch.equal(found.gather(2, positions.expand(-1, 3, -1)), plain)
    alone = mass_by_position([ScoredTokens(scores[1:], positions=positions[1:])], normaliser[1:], 40)
    assert torch.equal(alone, found[1:])


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("counted", [None, "a byte", "numbers"])
@pytest.mark.parametrize(
    ("asked", "kinds"), [(1, (None,)), (4, (None, torch.int64, torch.int32)), (18, (torch.int32,) * 5)]
)
def test_mass_is_added_by_position(form, counted, asked, kinds, monkeypatch):
    """`mass` is a view of a larger tensor, and some positions are negative or beyond it. Elements without a visible token keep
    their bits."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    before, reach = 20, 250
    spans, _ = numbered(2, 3, asked, kinds)
    normaliser = torch.cat([span.scores for span in spans], -1).double().logsumexp(-1, keepdim=True)
    weights = {None: None, "a byte": torch.tensor([1, 0]).byte(), "numbers": torch.tensor([0.25, 3.0])}[counted]
    spans = [
        ScoredTokens(
            span.scores, None if weights is None else weights[:, None, None].expand(-1, 1, 290), span.positions - before
        )
        for span in spans
    ]
    whole = torch.rand(4, 3, 300, generator=torch.Generator().manual_seed(2))
    there, mass = whole.clone(), whole[1:3, :, 30 : 30 + reach]
    launched = watch(monkeypatch, "probability_mass")
    assert add_mass_by_position(spans, normaliser.float(), mass) is None
    assert counts(launched) == ({"sum_rows": -(-len(kinds) // 4)} if form == "triton" else {})
    expected, met = there.double(), torch.zeros(4, 3, 300, dtype=torch.bool)
    bits, below, beyond = there.clone(), 0, 0
    sums = probability_mass([ScoredTokens(span.scores, span.weights) for span in spans], normaliser.float())
    for span, own in zip(spans, sums, strict=True):
        shares = (span.scores.double() - normaliser).exp().sum(2)
        for row, head, token in (span.scores > -torch.inf).any(2).nonzero().tolist():
            at = span.positions + token if isinstance(span.positions, int) else int(span.positions[row, head, token])
            below, beyond = below + (at < 0), beyond + (at >= reach)
            if 0 <= at < reach:
                place = row + 1, head, at + 30
                expected[place] += shares[row, head, token] * (1 if weights is None else float(weights[row]))
                bits[place] += own[row, head, token]
                met[place] = True
    assert below and beyond and met.any() and not met[1:3, :, 30:280].all()
    assert torch.equal(whole, bits) and torch.equal(whole[~met], there[~met])
    assert (whole.double() - expected)[met].abs().max() <= 4 * FLOAT32_ATTENTION * max(1, expected.max())
    assert (counted == "a byte") == torch.equal(whole[2], there[2])


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_a_window_and_the_token_behind_it(form, monkeypatch):
    """The two spans of a decode step: slots of a window, masked if unused (also the slot that the new token will get), and the new
    token. Then a window without slots."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    draw, used = torch.Generator().manual_seed(3), torch.tensor([5, 0, 11])
    scores = torch.randn(3, 2, 4, 13, generator=draw)
    scores[..., :12].masked_fill_(torch.arange(12) >= used[:, None, None, None], -torch.inf)
    normaliser, there = scores.logsumexp(-1, keepdim=True), torch.rand(3, 2, 14, generator=draw)
    shares = (scores.double() - normaliser.double()).exp().sum(2)
    expected, mass = there.double(), there.clone()
    expected[..., :12] += shares[..., :12]
    expected[torch.arange(3), :, used] += shares[..., 12]
    new = ScoredTokens(scores[..., 12:], positions=used[:, None, None])
    add_mass_by_position([ScoredTokens(scores[..., :12], positions=0), new], normaliser, mass)
    assert (mass.double() - expected).abs().max() <= 4 * FLOAT32_ATTENTION
    unmet = torch.arange(14) > used[:, None, None]
    assert torch.equal(mass[unmet.expand_as(mass)], there[unmet.expand_as(mass)])
    again = mass.clone()
    add_mass_by_position([ScoredTokens(scores[..., :0], positions=3), new], normaliser, again)
    (own,) = probability_mass([ScoredTokens(new.scores)], normaliser)
    mass[torch.arange(3), :, used] += own[..., 0]
    assert torch.equal(again, mass)
