"""Kernels of a decode step besides attention over codes: exact tokens with returned scores, attention mass, the budget of heavy
hitters, storing, outliers. Against float64 or plain torch on the CPU; repeated launches give the same bits."""

import pytest
import torch
from gpu.moved import moved, near

from calib.kernels.attend.operation import Attended, ExactGroup, ExactTokens, attend_exact
from calib.kernels.heavy_hitters import reference as budget_reference
from calib.kernels.heavy_hitters.operation import BudgetSlots, MassRule, NewToken, enter_ring
from calib.kernels.outliers.operation import scores_of
from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.outliers.reference import in_order
from calib.kernels.outliers.row_lists import Entries, RowLists, by_channel, by_token
from calib.kernels.outliers.triton import add_to_mixtures
from calib.kernels.probability_mass.operation import ScoredTokens, probability_mass
from calib.runtime.paging.field import Field
from calib.runtime.paging.pool import PagePool
from calib.runtime.paging.token_runs import TokenRuns

ROWS, HEADS, CHANNELS, PAGE = 3, 4, 64, 64


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("runs", [1, 7])
@pytest.mark.parametrize("asked", [1, 4, 12])
def test_exact_tokens_told_and_their_mass(device, times, asked, runs):
    counts = (9 * times, 1)
    query = drawn(ROWS, HEADS, asked, CHANNELS, seed=1).bfloat16()
    groups = tuple(
        ExactGroup(*(drawn(ROWS, HEADS, n, CHANNELS, seed=seed + i).bfloat16() for seed in (2, 4)))
        for i, n in enumerate(counts)
    )
    hidden = torch.rand(ROWS, HEADS, 1, sum(counts), generator=torch.Generator().manual_seed(6)) < 0.3
    hidden[..., -1] = False
    other = drawn(ROWS, HEADS, runs, asked, 20 * times, seed=7)
    top = other.amax(-1, keepdim=True)
    weights = (other - top).exp()
    found = (top, weights.sum(-1, keepdim=True), drawn(*top.shape[:4], CHANNELS, seed=8))
    part = Attended(*(one[:, :, 0] if runs == 1 else one for one in found), None)
    keys = torch.cat([group.keys for group in groups], 2).double()
    scores = (query.double() @ keys.mT / 8).masked_fill(hidden, -torch.inf)
    every = torch.cat([other.transpose(2, 3).flatten(3).double(), scores], -1)
    found = attend_exact(
        *moved((query, ExactTokens(groups, hidden), [part]), device), scale=0.125, told=True, dtype=torch.float32
    )
    near(found.normaliser, every.logsumexp(-1, keepdim=True), 1e-4)
    assert torch.equal(found.scores.isneginf().cpu(), hidden.expand_as(scores))
    near(found.scores.cpu().masked_fill(hidden, 0), scores.masked_fill(hidden, 0), 1e-4)
    (mass,) = probability_mass([ScoredTokens(found.scores)], found.normaliser)
    near(mass, (scores - every.logsumexp(-1, keepdim=True)).exp().sum(2), 1e-3)


@pytest.mark.parametrize(("start", "count"), [(0, 5 * PAGE + 7), (PAGE, 3 * PAGE), (9, 2 * PAGE), (3, 1)])
def test_a_prompt_in_pages(device, times, start, count, monkeypatch):
    """A prompt is written to pages in random order, also with partly filled first and last pages: words, parameters per token and
    per page, exact tokens."""
    fields = {
        "words": Field(1, 32, torch.int16, "codes"),
        "parameters": Field(1, 2, torch.float16, "parameters"),
        "scales": Field(PAGE, 256, torch.float16, "parameters"),
        "exact": Field(1, 128, torch.bfloat16, "exact"),
    }
    start, count = (start, count) if start % PAGE == 0 else (start * times, count * times)
    pages = torch.randperm(12 * times, generator=torch.Generator().manual_seed(1)).tolist()
    if start % PAGE or count % PAGE:
        del fields["scales"]
    block = {
        name: drawn(HEADS, count // field.tokens_per_row, field.width, seed=2).mul(100).to(field.dtype)
        for name, field in fields.items()
    }
    found = []
    for where in (device, torch.device("cpu")):
        pool = PagePool(fields, HEADS, where, PAGE)
        pool.grow(12 * times)
        pool.write_runs(TokenRuns([pages], [start]), {name: part[None].to(where) for name, part in block.items()})
        found.append({name: tensor.cpu() for name, tensor in pool.tensors.items()})
        monkeypatch.setenv("CALIB_KERNELS", "reference")
    for name, tensor in found[1].items():
        assert tensor.any() and torch.equal(found[0][name], tensor)


@pytest.mark.parametrize(
    "rule", [MassRule(), MassRule(adds_up=False), MassRule(limit=2.0), MassRule(mean=True), None], ids=str
)
def test_a_budget_step(device, times, rule):
    """Six steps on the same pages: masses, pages and removed tokens have the bits of plain torch after each."""
    slots, draw = 2 * PAGE * times, torch.Generator().manual_seed(3)
    numbers, pages = 0 if rule is None else 1 + rule.mean, ROWS * slots // PAGE
    mass = torch.randint(0, 6, (ROWS, numbers * HEADS, slots), generator=draw).float() / 2
    table = torch.randperm(pages, generator=draw).view(ROWS, -1).int()
    positions = torch.stack([torch.randperm(pages * PAGE, generator=draw) for _ in range(HEADS)])
    positions = positions.view(HEADS, pages, PAGE).transpose(0, 1).contiguous().int()[..., None]
    fields = [
        drawn(pages, HEADS, PAGE, CHANNELS, seed=9).bfloat16(),
        drawn(pages, HEADS, PAGE, 12, seed=10).bfloat16(),
        positions,
    ]
    here, there = [part.clone() for part in (mass, *fields)], [part.to(device, copy=True) for part in (mass, *fields)]
    for step in range(6):
        ring = torch.tensor([step, 5 + step, 2])
        numbers_of = BudgetSlots(
            ring, ring, torch.tensor([8, 16, 20]), torch.tensor([slots, slots - 3, 20]), table, positions
        )
        shown = torch.randint(0, 3, (ROWS, mass.shape[1], slots - 1), generator=draw) / 2
        fresh = torch.randint(0, 3, (ROWS, mass.shape[1], 1), generator=draw) / 2
        new = [drawn(ROWS, HEADS, 1, part.shape[3], seed=20 + step).to(part.dtype) for part in fields[:2]]
        new.append(torch.full((ROWS, HEADS, 1, 1), 10_000 + step, dtype=torch.int32))
        own = [NewToken(*one) for one in zip(here[1:], new, strict=True)]
        plain = budget_reference.enter_ring(rule, here[0], shown, fresh, numbers_of._replace(positions=here[3]), own)
        on_device = BudgetSlots(*(part.to(device) for part in numbers_of[:5]), there[3])
        given = [NewToken(into, token.to(device)) for into, token in zip(there[1:], new, strict=True)]
        found = enter_ring(rule, there[0], shown.to(device), fresh.to(device), on_device, given)
        for one, other in zip([*found, *there], [*plain, *here], strict=True):
            assert torch.equal(one.cpu(), other)


def test_scores_of_outliers_that_pages_list(device, times):
    """The kernel writes a tile of outliers that other threads of its program read. Four launches give the same bits."""
    pages, draw = 2 * times, torch.Generator().manual_seed(5)
    order = torch.rand(ROWS * pages, HEADS, CHANNELS, PAGE, generator=draw).argsort(-1)[..., :6]
    distance = torch.randn(ROWS * pages, HEADS, CHANNELS, 6, generator=draw).half()
    dense = torch.zeros(ROWS * pages, HEADS, CHANNELS, PAGE, dtype=torch.float64)
    dense = dense.scatter_(-1, order, distance.double()).mT
    order, distance = in_order(order, distance)
    held = (part.mT.flatten(2)[:, :, None].contiguous() for part in (distance, order.to(torch.int16)))
    terms = PageTerms(*held, listed=True)
    table = torch.arange(ROWS * pages, dtype=torch.int32).view(ROWS, pages)
    query, used = drawn(ROWS, HEADS, 4, CHANNELS, seed=2), torch.full((ROWS,), pages * PAGE, dtype=torch.int32)
    given = moved((query, terms, table, used), device)
    found = [scores_of(*given, PAGE) for _ in range(4)]
    near(found[0], query.double() @ dense[table.long()].transpose(1, 2).flatten(2, 3).mT, 1e-4)
    assert all(torch.equal(found[0], again) for again in found[1:])


@pytest.mark.parametrize("in_few", [False, True], ids=["of any channel", "of few channels"])
@pytest.mark.parametrize("asked", [1, 4, 12])
def test_outliers_that_rows_list(device, times, asked, in_few):
    """Lanes read numbers that other lanes have written: queries, weights, and sums of channels whose entries several lanes share.
    Four launches give the same bits."""
    tokens, draw = 9 * PAGE * times + 5, torch.Generator().manual_seed(5)
    size, streams = HEADS * tokens * CHANNELS, []
    for listed in (by_token, by_channel):
        rows, dense = [], torch.zeros(ROWS, size, dtype=torch.float64)
        for row in range(ROWS):
            likely = torch.rand(HEADS, tokens, CHANNELS, generator=draw)
            likely[..., 3:5] += 0.9 * in_few
            flat = likely.flatten().topk(size // 50).indices
            distance = torch.randn(len(flat), generator=draw).half()
            dense[row, flat] = distance.double()
            where = flat // (tokens * CHANNELS), flat // CHANNELS % tokens, flat % CHANNELS
            rows.append(listed(Entries(*where, distance), HEADS, tokens, CHANNELS))
        held = {name: torch.cat([own[name] for own in rows]) for name in rows[0]}
        kinds = {"delta": torch.float16, "starts": torch.int32}
        held = {name: part.to(kinds.get(name, torch.int16)) for name, part in held.items()}
        streams.append((PageTerms(lists=RowLists(**held)), dense.view(ROWS, HEADS, tokens, CHANNELS)))
    pages = -(-tokens // PAGE)
    table = torch.arange(ROWS * pages, dtype=torch.int32).view(ROWS, pages)
    query, used = drawn(ROWS, HEADS, asked, CHANNELS, seed=2), torch.full((ROWS,), tokens, dtype=torch.int32)
    (keys, of_keys), (values, of_values) = streams
    found = [scores_of(*moved((query, keys, table, used), device), PAGE)[..., :tokens] for _ in range(4)]
    near(found[0], query.double() @ of_keys.mT, 1e-4)
    assert all(torch.equal(found[0], again) for again in found[1:])
    run, slots = -(-pages // 3), pages * PAGE
    scores = drawn(ROWS, HEADS, asked, slots, seed=3)
    part = torch.arange(tokens) // (run * PAGE)
    weights = torch.stack([scores[..., :tokens].double().exp() * (part == n) for n in range(3)], 2)
    expected = weights @ of_values[:, :, None]
    sums = []
    for _ in range(4):
        top, mixed, *given = moved(
            (torch.zeros(expected.shape[:-1]), torch.zeros(expected.shape), scores, values, table, used), device
        )
        scored, terms, *where = given
        add_to_mixtures((top, mixed), scored, terms, None, *where, PAGE, run, PAGE, CHANNELS, None)
        sums.append(mixed)
    near(sums[0], expected, 1e-4)
    assert all(torch.equal(sums[0], again) for again in sums[1:])
