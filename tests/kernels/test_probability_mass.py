"""Probabilities summed over query rows, from scores and log-sum-exp, against float64; the kernel interpreted."""

import pytest
import torch
from launches import counts, watch
from tolerances import FLOAT32_ATTENTION

from calib.kernels.probability_mass.operation import ScoredTokens, probability_mass

pytestmark = pytest.mark.arithmetic


def scored(rows, heads, asked, tokens, columns):
    """Scores of spans that lie apart, some tokens hidden, their normaliser, and the mass of each token by float64."""
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
def test_some_rows_of_a_query(form, monkeypatch):
    """A view of the newest column's rows, of scores and normaliser alike; and a row of a batch as alone."""
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
