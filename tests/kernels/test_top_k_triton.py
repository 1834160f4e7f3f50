"""Positions of the largest scores: plain torch and the interpreted kernel against Python's sorting."""

import pytest
import torch
from torch import Tensor

from calib.kernels.top_k import operation, reference

pytestmark = pytest.mark.arithmetic

triton = pytest.importorskip("calib.kernels.top_k.triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with -77, so that positions which the kernel did not write are noticed."""
    empty = torch.empty
    monkeypatch.setattr(triton.torch, "empty", lambda *shape, **of: empty(*shape, **of).fill_(-77))


def expected(scores: Tensor, k: int) -> Tensor:
    """The k largest, by Python's stable sort."""
    found = torch.full((*scores.shape[:2], k), -1)
    for positions, own in zip(found.view(-1, k), scores.reshape(-1, scores.shape[2]).tolist(), strict=True):
        best = sorted(range(len(own)), key=lambda position: -own[position])[:k]
        chosen = sorted(position for position in best if own[position] > -torch.inf)
        positions[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return found


def drawn(kind: str, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(tokens)
    scores = torch.randn(1, 2, tokens, generator=draw)
    if kind == "equals":
        return (scores * 2).round()
    if kind == "mostly hidden":
        return scores.masked_fill(torch.rand(scores.shape, generator=draw) < 0.9, -torch.inf)
    if kind == "none":
        return torch.full_like(scores, -torch.inf)
    if kind == "zeros of both signs":
        return (scores > 1.5) * scores.sign() * (scores > 0.5) + scores.sign() * 0.0
    if kind == "probabilities":  # many share their leading bits
        return scores.mul(8).softmax(-1)
    if kind == "last digits":
        return (1 + torch.randint(0, 300, scores.shape, generator=draw) * 2**-23).masked_fill(scores > 0, -1e-42)
    if kind == "extremes":
        largest = torch.finfo(torch.float32).max
        numbers = torch.tensor([largest, -largest, torch.inf, -torch.inf, 1e-45, -1e-45, 0.0, 1.0])
        return numbers[torch.randint(0, 8, scores.shape, generator=draw)]
    return scores


KINDS = ("equals", "mostly hidden", "none", "zeros of both signs", "probabilities", "last digits", "extremes", "normal")


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_the_largest(kind, tokens):
    scores = drawn(kind, tokens)
    before = scores.clone()
    for k in {1, tokens // 7, tokens} - {0}:
        wanted = expected(scores, k)
        assert torch.equal(reference.top_k(scores, k), wanted)
        assert torch.equal(triton.top_k(scores, k), wanted)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_several_tiles(kind, monkeypatch):
    monkeypatch.setattr(triton, "TILE", 128)
    scores = drawn(kind, 777)
    for k in (64, 300):
        assert torch.equal(triton.top_k(scores, k), expected(scores, k))


def test_a_tile_as_the_device_has_it():
    scores = drawn("equals", 2 * triton.TILE + 5)[:, :1]
    for k in (64, triton.TILE + 100):
        assert torch.equal(triton.top_k(scores, k), reference.top_k(scores, k))


def test_a_part_of_a_larger_tensor():
    whole = torch.full((4, 5, 70), torch.inf)
    part = whole.transpose(0, 1)[1:4, 1:, 5:-5]
    part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(triton.top_k(part, 9), expected(part, 9))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [128, None])
def test_scores_between_two_ends(kind, tile, monkeypatch):
    """`ends`: no score, fewer than k, whole tiles, or ends beyond the scores. Scores outside may be anything, also NaN."""
    if tile:
        monkeypatch.setattr(triton, "TILE", tile)
    ends = torch.tensor([[0, 700], [128, 256], [5, 699], [300, 310], [40, 40], [90, 30], [-3, 9000], [699, 700]])
    scores = drawn(kind, 4 * 700).view(8, 1, 700)
    at = torch.arange(700)
    beside = (at < ends[:, :1]) | (at >= ends[:, 1:])
    for k, anything in ((1, torch.inf), (64, torch.nan), (700, 0.5)):
        wanted = expected(scores.masked_fill(beside[:, None], -torch.inf), k)
        given = scores.masked_fill(beside[:, None], anything)
        assert torch.equal(triton.top_k(given, k, ends.int()), wanted)
        assert torch.equal(reference.top_k(given, k, ends.int()), wanted)


def test_none_of_none():
    for k, shape in ((0, (2, 3, 5)), (0, (2, 3, 0)), (2, (0, 3, 5))):
        for form in (reference, triton):
            found = form.top_k(torch.zeros(shape), k)
            assert (found.shape, found.dtype) == ((*shape[:2], k), torch.int64)


@pytest.mark.parametrize("k", [-1, 6])
def test_more_than_there_are(k):
    with pytest.raises(ValueError, match=f"between 0 and the 5 scores of a row, got {k}"):
        operation.top_k(torch.zeros(1, 1, 5), k)


COUNTS = ([300, 477], [0, 777], [777, 0], [777], [40], [200, 300], [200, 300, 277], [1, 0, 5, 771])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("tile", [128, None])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_in_parts(kind, tile, counts, monkeypatch):
    """`divided`: also scores of -inf are in a part; scores beyond the sum of `counts` are in none."""
    if tile:
        monkeypatch.setattr(triton, "TILE", tile)
    scores, at = drawn(kind, 777), 0
    ranked = [sorted(range(777), key=lambda position, own=own: -own[position]) for own in scores[0].tolist()]
    found = [form.divided(scores, counts) for form in (reference, triton)]
    for count, *parts in zip(counts, *found, strict=True):
        wanted = torch.tensor([sorted(own[at : at + count]) for own in ranked], dtype=torch.int64)[None]
        assert all(torch.equal(part, wanted) and part.is_contiguous() for part in parts)
        at += count


@pytest.mark.parametrize("counts", [[-1, 3], [3, 3]], ids=str)
def test_more_parts_than_there_are_scores(counts):
    with pytest.raises(ValueError, match="at most 5 together"):
        operation.divided(torch.zeros(1, 1, 5), counts)


def test_parts_of_nothing():
    for form in (reference, triton):
        for shape, counts in (((2, 3, 0), [0, 0]), ((0, 3, 5), [2, 3])):
            found = form.divided(torch.zeros(shape), counts)
            assert [part.shape for part in found] == [(*shape[:2], count) for count in counts]


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_runs_what_serves(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked = []
    original = triton.top_k
    monkeypatch.setattr(triton, "top_k", lambda *given: asked.append(given) or original(*given))
    scores = drawn("equals", 63)
    assert torch.equal(operation.top_k(scores, 9), expected(scores, 9))
    ends = torch.tensor([[4, 60]], dtype=torch.int32)
    assert torch.equal(operation.top_k(scores, 9, ends), reference.top_k(scores, 9, ends))
    assert len(asked) == 2 * (forced == "triton")
    launches = []
    launch = triton._launch
    monkeypatch.setattr(triton, "_launch", lambda *given: launches.append(given) or launch(*given))
    parts = operation.divided(scores, [9, 54])
    assert all(map(torch.equal, parts, reference.divided(scores, [9, 54])))
    assert len(launches) == (forced == "triton")
    asked.clear()
    assert torch.equal(operation.top_k(scores.double(), 9), expected(scores, 9))
    assert torch.equal(operation.top_k(scores.mT.contiguous().mT, 9), expected(scores, 9))
    assert not asked
