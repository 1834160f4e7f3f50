"""Kernels for outliers and low-rank coefficients of pages (`PageTerms`), interpreted, against dense products in float64."""

from dataclasses import replace

import pytest
import torch

from calib.kernels.outliers import list_triton, operation, row_lists, triton
from calib.kernels.outliers.page_terms import PageTerms
from calib.kernels.outliers.reference import in_order, sparse_product
from calib.kernels.outliers.row_lists import Entries, RowLists

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

PAGES, HEADS, CPU = 7, 2, torch.device("cpu")

# Queries and weights are split into two float16 numbers, 22 bits relative to the largest of a row; sums are float32.
SPLIT = 2.0**-20


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output and scratch buffers are filled with NaN, so that unwritten numbers are noticed."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: filled(empty(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: filled(new_empty(*args, **kwargs)))


def filled(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() and not x.is_meta else x


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=draws(seed))


def unsigned(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers in the dtype of pages; int16 holds unsigned 16-bit numbers."""
    return torch.where(x >= 2**15, x - 2**16, x).to(dtype) if dtype == torch.int16 else x.to(dtype)


def lists(
    count: int,
    tokens: int,
    wide: int,
    channels: int,
    seed: int,
    unused: int = 0,
    index=torch.int16,
    delta=torch.float16,
) -> tuple[PageTerms, torch.Tensor]:
    """`count` pages with `wide` outliers per channel, `unused` of them without delta, and the same dense: float64 `[count, heads,
    tokens, D]`."""
    draw = draws(seed)
    order = torch.rand(count, HEADS, channels, tokens, generator=draw).argsort(-1)[..., :wide]
    distance = torch.randn(count, HEADS, channels, wide, generator=draw).to(delta)
    order[..., wide - unused :], distance[..., wide - unused :] = 0, 0
    dense = torch.zeros(count, HEADS, channels, tokens, dtype=torch.float64).scatter_add_(-1, order, distance.double())
    order, distance = in_order(order, distance)
    held = (part.mT.flatten(2)[:, :, None].contiguous() for part in (distance, unsigned(order, index)))
    return PageTerms(*held, listed=True), dense.mT


def of_rows(
    count: int,
    tokens: int,
    wide: int,
    channels: int,
    seed: int,
    delta=torch.float16,
    by_token: bool = True,
    in_few: bool = False,
) -> tuple[RowLists, torch.Tensor]:
    """Lists of `count` segments with `wide` entries of all heads, a seventh of them unused, and the same dense: float64 `[count,
    heads, tokens, D]`. `in_few`: most entries are of one token or one channel."""
    draw, size, found, dense = draws(seed), HEADS * tokens * channels, [], []
    for _ in range(count):
        likely = torch.rand(HEADS, tokens, channels, generator=draw)
        if in_few:
            likely[:, tokens // 3], likely[1, :, channels // 2] = likely[:, tokens // 3] + 0.9, likely[1, :, 5] + 0.9
        flat = likely.flatten().topk(wide).indices[torch.randperm(wide, generator=draw)]
        distance = torch.randn(wide, generator=draw).to(delta)
        distance[::7] = 0
        dense.append(torch.zeros(size, dtype=torch.float64).index_put_((flat,), distance.double()))
        entries = Entries(flat // (tokens * channels), flat // channels % tokens, flat % channels, distance)
        found.append((row_lists.by_token if by_token else row_lists.by_channel)(entries, HEADS, tokens, channels))
    held = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    kinds = {"delta": delta, "starts": torch.int32, "begins": torch.int16}
    kinds |= {"index": torch.uint8 if by_token and channels <= 256 else torch.int16}
    held = {name: part if name == "delta" else unsigned(part, kinds[name]) for name, part in held.items()}
    return RowLists(**held), torch.stack(dense).view(count, HEADS, tokens, channels)


def of_tokens(
    page: int, wide: int, channels: int, seed: int, across: bool, index=torch.uint8, delta=torch.float16
) -> tuple[PageTerms, torch.Tensor]:
    """`wide` outliers per token, one of them unused, and the same dense: float64 `[pages, heads, page_tokens, D]`."""
    own, draw = 1 if across else HEADS, draws(seed)
    total = channels * (HEADS if across else 1)
    channel = torch.rand(PAGES, own, page, total, generator=draw).argsort(-1)[..., :wide]
    distance = torch.randn(PAGES, own, page, wide, generator=draw).to(delta)
    channel[..., -1], distance[..., -1] = 0, 0
    dense = torch.zeros(PAGES, own, page, total, dtype=torch.float64).scatter_add_(-1, channel, distance.double())
    terms = PageTerms(distance, unsigned(channel, index), across=across)
    return terms, dense[:, 0].unflatten(-1, (HEADS, -1)).transpose(1, 2) if across else dense


def factors(page: int, rank: int, channels: int, seed: int, shared: bool = False) -> tuple[dict, torch.Tensor]:
    coefficients = randn(PAGES, 1 if shared else HEADS, page, rank, seed=seed).half()
    basis = randn(PAGES, HEADS, 1, rank * channels, seed=seed + 1).half()
    dense = coefficients.double() @ basis[:, :, 0].double().unflatten(-1, (rank, channels))
    return {"coefficients": coefficients, "basis": basis}, dense


def slots_of(dense: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The tokens of each row: `[pages, heads, page_tokens, D]` gathered to `[rows, heads, slots, D]`."""
    return dense[table.long()].transpose(1, 2).flatten(2, 3)


def assert_scores(query, terms, dense, table, used, page, **options):
    """Assert that the scores of `terms` are those of the same numbers dense, `[rows, heads, slots, D]`, within SPLIT."""
    assert operation.supported(terms, query.shape[-1], CPU)
    found = operation.scores_of(query, terms, table, used, page, **options)
    scale = options.get("scale", 1.0) * (1 if options.get("map_scale") is None else options["map_scale"].double())
    asked = query.double() * scale
    expected, sizes = asked @ dense.mT, asked.abs().amax(-1, keepdim=True) * dense.abs().sum(-1)[:, :, None]
    for row, count in enumerate(used.tolist()):
        error = (found[row, ..., :count].double() - expected[row, ..., :count]).abs()
        assert (error <= SPLIT * sizes[row, ..., :count]).all(), error.max()
        assert expected[row, ..., :count].any()
    return found


TABLE = torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=torch.int32)


@pytest.mark.parametrize("in_few", [False, True])
@pytest.mark.parametrize("delta", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("page", "channels", "asked"), [(64, 32, 4), (20, 24, 1), (16, 80, 9), (128, 16, 19)])
def test_lists_of_rows(page, channels, asked, delta, in_few):
    """Keys: each row reads its own record's list."""
    used, tokens = torch.tensor([3 * page, 2 * page + 5], dtype=torch.int32), 3 * page
    own, dense = of_rows(3, tokens, tokens * channels // 20, channels, page, delta, in_few=in_few)
    query = randn(2, HEADS, asked, channels, seed=1)
    for records in (None, torch.tensor([2, 1], dtype=torch.int32)):
        terms = PageTerms(lists=replace(own, records=records))
        chosen = dense[:2] if records is None else dense[records.long()]
        assert_scores(query, terms, chosen, TABLE, used, page, scale=0.3, map_scale=randn(2, 1, 1, channels, seed=7))


@pytest.mark.full
def test_lists_of_rows_from_a_later_token():
    """Slot 0 holds token 40 of its segment, as with a sliding window, or token 40,000, behind many stretches."""
    own, dense = of_rows(2, 40_192, 60_000, 16, 3)
    query, used = randn(2, HEADS, 2, 16, seed=4), torch.tensor([192, 150], dtype=torch.int32)
    for first in (40, 40_000):
        terms = PageTerms(lists=replace(own, first=first))
        assert_scores(query, terms, dense[:, :, first : first + 192], TABLE, used, 64)


def test_a_list_ends_where_its_room_does():
    """With wrong offsets, as a damaged file may have, nothing behind the record's own list is read."""
    own, _ = of_rows(2, 192, 300, 16, 3)
    own.delta[1] = torch.nan  # the next record's, two entries of each token from the 150th on
    begins = (torch.arange(193) * 2).to(torch.int16).expand(own.begins.shape).contiguous()
    records = torch.zeros(2, dtype=torch.int32)
    wrong = PageTerms(lists=replace(own, starts=torch.zeros_like(own.starts), begins=begins, records=records))
    query, used = randn(2, HEADS, 2, 16, seed=4), torch.tensor([192, 192], dtype=torch.int32)
    found = operation.scores_of(query, wrong, TABLE, used, 64)
    assert found.isfinite().all() and found[..., :150].any() and not found[..., 150:].any()


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize(("page", "wide", "rank"), [(20, 2, 2), (20, 4, 0), (48, 6, 3), (100, 2, 1)])
def test_lists_of_pages(page, wide, rank, programs, monkeypatch):
    """Outliers listed per page and channel, together with coefficients of each page's own basis in the same launch."""
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    terms, dense = lists(PAGES, page, wide, 32, page)
    if rank:
        held, more = factors(page, rank, 32, 5)
        terms, dense = replace(terms, **held), dense + more
    used = torch.tensor([2 * page + 3, 3 * page], dtype=torch.int32)
    query = randn(2, HEADS, 3, 32, seed=6)
    assert_scores(
        query, terms, slots_of(dense, TABLE), TABLE, used, page, map_scale=randn(1, HEADS, 1, 32, seed=7).half()
    )


@pytest.mark.full
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(("page", "wide", "asked"), [(64, 7, 4), (20, 40, 1), (16, 2, 9)])
def test_outliers_of_tokens_among_keys(page, wide, asked, across):
    terms, dense = of_tokens(page, wide, 48, wide, across)
    used = torch.tensor([2 * page, 3 * page - 1], dtype=torch.int32)
    query = randn(2, HEADS, asked, 48, seed=8).bfloat16()
    assert_scores(
        query, terms, slots_of(dense, TABLE), TABLE, used, page, scale=0.2, map_scale=randn(2, 1, 1, 48, seed=7)
    )


def test_coefficients_alone():
    held, dense = factors(20, 2, 32, 9, shared=True)
    used = torch.tensor([60, 41], dtype=torch.int32)
    assert_scores(randn(2, HEADS, 2, 32, seed=1), PageTerms(**held), slots_of(dense, TABLE), TABLE, used, 20)


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
def test_a_row_is_the_same_alone(programs, monkeypatch):
    """A row has the same bits alone, in a batch and in a repeated call, with few programs or many."""
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    page, query = 64, randn(2, HEADS, 4, 32, seed=1)
    used = torch.tensor([180, 130], dtype=torch.int32)
    monkeypatch.setattr(list_triton, "multiprocessors", lambda device: programs)
    held = replace(of_rows(2, 192, 900, 32, 1)[0], records=torch.tensor([1, 0], dtype=torch.int32))
    terms = PageTerms(lists=held)
    both = [operation.scores_of(query, terms, TABLE, used, page) for _ in range(2)]
    for row, count in enumerate(used.tolist()):
        own = slice(row, row + 1)
        alone = PageTerms(lists=replace(held, records=held.records[own]))
        alone = operation.scores_of(query[own], alone, TABLE[own], used[own], page)
        assert torch.equal(alone[0, ..., :count], both[0][row, ..., :count])
        assert torch.equal(both[1][row, ..., :count], both[0][row, ..., :count])


def test_the_same_as_the_sparse_product():
    """Scores of lists are those of the plain torch product (`sparse_product`) with their entries."""
    terms, _ = lists(1, 64, 6, 16, 1)
    query = randn(1, HEADS, 3, 16, seed=2)
    used = torch.tensor([64], dtype=torch.int32)
    found = operation.scores_of(query, terms, torch.zeros(1, 1, dtype=torch.int32), used, 64)
    for head in range(HEADS):
        delta, token = (part[:, head, 0] for part in (terms.delta, terms.index))
        channel = torch.arange(delta.shape[1])[None] % 16
        expected = sparse_product(query[:, head], channel, token.long(), delta.float(), 64)
        torch.testing.assert_close(found[:, head], expected, rtol=1e-5, atol=1e-5)


# --- mixtures


def assert_mixtures(terms, dense, page, turn, splits, asked, channels, ranked=0, map_scale=None, used=(0, 0), behind=0):
    """Assert that each part's mixture gains its weights times `dense [rows, heads, slots, D]`, and its low-rank coefficients times
    their vectors."""
    rows, slots = len(TABLE), TABLE.shape[1] * page
    turns = TABLE.shape[1] * -(-page // turn)
    run = -(-turns // splits)
    splits = -(-turns // run)
    counts = torch.tensor(used, dtype=torch.int32)
    scores = randn(rows, HEADS, asked, slots, seed=11) * 2
    scores[..., 3] = -torch.inf  # hidden
    for row, count in enumerate(used):
        scores[row, ..., count:] = -torch.inf
    padded = -(-page // turn) * turn
    at = torch.arange(slots)
    part = (at // page * padded + at % page) // (run * turn)
    top = torch.full((rows, HEADS, splits, asked), -1.0e37)
    for number in range(splits):
        own = scores[..., part == number]
        top[:, :, number] = own.amax(-1).clamp_min(-1.0e37) if own.shape[-1] else -1.0e37
    vectors = randn(1, HEADS, ranked, channels, seed=12).half() if ranked else None
    mixed = randn(rows, HEADS, splits, asked, channels + ranked + behind, seed=13)
    weights = (scores.double()[:, :, None] - top.double()[..., None]).exp()
    elsewhere = (part != torch.arange(splits)[:, None])[None, None, :, None, :]
    weights = weights.masked_fill(elsewhere, 0)
    there = (weights > 0).double().amax(3, keepdim=True).expand_as(weights)
    added = torch.einsum("bhsrt,bhtd->bhsrd", weights, dense)
    sizes = torch.einsum("bhsrt,bhtd->bhsrd", there, dense.abs())
    if vectors is not None:
        coefficients = mixed[..., channels : channels + ranked].double()
        added = added + torch.einsum("bhsrj,hjd->bhsrd", coefficients, vectors[0].double())
        sizes = sizes + torch.einsum("bhsrj,hjd->bhsrd", coefficients.abs(), vectors[0].double().abs())
    if map_scale is not None:
        factor = map_scale.double()[:, :, None]
        added, sizes = added * factor, sizes * factor.abs()
    before, asks = mixed.clone(), terms.of_tokens
    triton.add_to_mixtures(
        (top, mixed), scores if asks else None, terms, vectors, TABLE, counts, page, run, turn, channels, map_scale
    )
    expected = before[..., :channels].double() + added
    error = (mixed[..., :channels].double() - expected).abs()
    assert (error <= SPLIT * (sizes + before[..., :channels].abs())).all(), error.max()
    assert torch.equal(mixed[..., channels:], before[..., channels:]) and added.abs().max() > 0.1


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(
    ("page", "turn", "splits", "wide", "ranked", "asked", "kinds"),
    [
        (64, 64, 1, 5, 4, 4, (torch.uint8, torch.float16)),
        (64, 32, 3, 40, 0, 1, (torch.int16, torch.float16)),
        (20, 32, 2, 3, 0, 9, (torch.uint8, torch.float16)),
        (16, 16, 3, 2, 1, 19, (torch.int32, torch.float32)),
    ],
    ids=str,
)
def test_outliers_of_values(page, turn, splits, wide, ranked, asked, kinds, across):
    terms, dense = of_tokens(page, wide, 48, wide, across, *kinds)
    used = (3 * page - 2, page + 1)
    scale = randn(1, HEADS, 1, 48, seed=2).half() if ranked else None
    dense = slots_of(dense, TABLE)
    assert_mixtures(terms, dense, page, turn, splits, asked, 48, ranked, scale, used)


@pytest.mark.parametrize("in_few", [False, True])
@pytest.mark.parametrize(
    ("page", "turn", "splits", "ranked", "asked", "channels", "delta"),
    [
        (64, 64, 1, 4, 4, 48, torch.float16),
        (64, 32, 3, 0, 1, 128, torch.float16),
        (20, 32, 2, 0, 9, 24, torch.float32),
        (16, 16, 3, 1, 19, 130, torch.float16),
    ],
    ids=str,
)
def test_lists_of_rows_of_values(page, turn, splits, ranked, asked, channels, delta, in_few):
    """Values: also if several lanes share a channel, or a lane has many channels."""
    own, dense = of_rows(3, 3 * page + 7, 5 * page, channels, page, delta, by_token=False, in_few=in_few)
    scale = randn(1, HEADS, 1, channels, seed=2).half() if ranked else None
    for records, first in ((None, 0), (torch.tensor([2, 1], dtype=torch.int32), 7)):
        terms = PageTerms(lists=replace(own, records=records, first=first))
        chosen = (dense[:2] if records is None else dense[records.long()])[:, :, first : first + 3 * page]
        used = (3 * page - 2, page + 1)
        assert_mixtures(terms, chosen, page, turn, splits, asked, channels, ranked, scale, used)


@pytest.mark.parametrize("entries", [0, 1, 31, 32, 33, 64, 500])
def test_as_many_outliers_as_lanes_or_not(entries):
    """All entries are of one channel, in several stretches of tokens."""
    draw = draws(entries)
    flat = torch.randperm(2 * 640, generator=draw)[:entries]
    found = Entries(flat // 640, flat % 640, torch.full_like(flat, 100), torch.randn(entries, generator=draw))
    held = row_lists.by_channel(found, HEADS, 640, 200)
    held = {name: torch.nn.functional.pad(part, (0, 3)) if name != "starts" else part for name, part in held.items()}
    kinds = {"delta": torch.float32, "index": torch.int16, "starts": torch.int32}
    own = RowLists(**{n: p if n == "delta" else unsigned(p, kinds[n]) for n, p in held.items()})
    dense = torch.zeros(1, HEADS, 640, 200, dtype=torch.float64)
    dense[0].index_put_((found.head, found.token, found.channel), found.delta.double())
    top, mixed = torch.zeros(1, HEADS, 2, 3), torch.zeros(1, HEADS, 2, 3, 200)
    scores, used = randn(1, HEADS, 3, 640, seed=1), torch.tensor([640], dtype=torch.int32)
    table = torch.arange(10, dtype=torch.int32)[None]
    triton.add_to_mixtures((top, mixed), scores, PageTerms(lists=own), None, table, used, 64, 5, 64, 200, None)
    expected = (scores.double().exp()[..., None] * dense[:, :, None]).unflatten(3, (2, 320)).sum(4).transpose(2, 3)
    assert (mixed.double() - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("wide", [0, 3])
def test_coefficients_of_a_page_s_vectors(wide):
    held, dense = factors(20, 2, 40, 3)
    terms = PageTerms()
    if wide:
        terms, own = of_tokens(20, wide, 40, 1, True)
        dense = dense + own
    assert_mixtures(replace(terms, **held), slots_of(dense, TABLE), 20, 32, 2, 4, 40, used=(60, 33))


def test_coefficients_behind_the_channels_alone():
    """Terms without outliers: the scores are not read."""
    dense = torch.zeros(2, HEADS, 3 * 64, 32, dtype=torch.float64)
    assert_mixtures(PageTerms(), dense, 64, 64, 3, 4, 32, ranked=4, used=(192, 100))


def test_what_lies_in_slots_that_are_not_used_has_no_part():
    terms, dense = of_tokens(20, 4, 32, 1, True)
    terms.delta[2, :, 10:] = torch.nan  # the last page of the second row
    assert_mixtures(terms, slots_of(dense.nan_to_num(), TABLE), 20, 32, 2, 2, 32, used=(60, 50))


# --- order, and what is served


def test_lists_in_order():
    """Entries are sorted by token. Unused ones (token 0, delta 0) come last, an entry of token 0 with a delta first."""
    tokens = torch.tensor([[5, 0, 2, 0, 0], [0, 0, 0, 0, 0]])
    delta = torch.tensor([[1.0, 0, 2, 3, 0], [0, 0, 0, 0, 0]])
    found = in_order(tokens, delta)
    assert found[0].tolist() == [[0, 2, 5, 0, 0], [0] * 5] and found[1].tolist() == [[3, 2, 1, 0, 0], [0] * 5]
    again = in_order(*found)
    assert all(map(torch.equal, found, again))


def test_what_is_not_served(monkeypatch):
    terms, _ = lists(2, 64, 4, 32, 1)
    assert operation.supported(terms, 32, CPU) and not operation.supported(terms, triton.MOST_CHANNELS + 1, CPU)
    held, _ = factors(20, triton.MOST_RANK + 1, 32, 1)
    assert not operation.supported(PageTerms(**held), 32, CPU)
    assert not operation.supported(replace(terms, delta=terms.delta.double()), 32, CPU)
    of_token, _ = of_tokens(16, 4, 32, 1, True)
    across = replace(of_token, delta=of_token.delta.transpose(2, 3).contiguous().transpose(2, 3))
    assert operation.supported(of_token, 32, CPU) and not operation.supported(across, 32, CPU)
    listed, _ = of_rows(1, 64, 40, 32, 1)
    assert operation.supported(PageTerms(lists=listed), 32, CPU)
    assert not operation.supported(PageTerms(lists=replace(listed, delta=listed.delta.double())), 32, CPU)
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    assert not operation.supported(terms, 32, CPU)
