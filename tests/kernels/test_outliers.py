"""Outliers of rows in plain torch: found by rank or by threshold, against loops; sparse products, against dense ones; and lists of
outliers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerances import FLOAT32_FOLD

from calib.kernels.outliers import reference
from calib.kernels.outliers.reference import extremes, first_beyond, run_counts, sparse_product
from calib.kernels.outliers.row_lists import Entries, by_channel, by_token, cleared_behind, numbers_of, span_of

pytestmark = pytest.mark.arithmetic

LENGTHS = (1, 2, 7, 8, 9, 16, 23, 64, 100, 129)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- ranked


@pytest.mark.parametrize("kind", ["normal", "steps", "constant", "zero", "two values", "large"])
@pytest.mark.parametrize("length", LENGTHS)
def test_extremes_are_the_largest_and_the_smallest_and_none_twice(length, kind):
    x = randn(2, 3, 5, length, seed=length)
    x = {
        "normal": x,
        "steps": x.round(),
        "constant": torch.full_like(x, -1.5),
        "zero": torch.zeros_like(x),
        "two values": (x > 0).float(),
        "large": x.sign() * 3e38,
    }[kind]
    for count in {0, 1, length // 4, length // 2}:
        if 2 * count > length:
            continue
        before = x.clone()
        positions = extremes(x, count)
        assert positions.shape == (2, 3, 5, 2 * count) and positions.dtype == torch.int64
        assert torch.equal(x, before)
        for row, chosen in zip(x.flatten(0, 2).numpy(), positions.flatten(0, 2).numpy(), strict=True):
            assert len(set(chosen.tolist())) == 2 * count
            ordered = np.sort(row)
            np.testing.assert_array_equal(np.sort(row[chosen[:count]]), ordered[length - count :])
            np.testing.assert_array_equal(np.sort(row[chosen[count:]]), ordered[:count])


# --- beyond a threshold


def beyond_by_hand(x: np.ndarray, low: np.ndarray, high: np.ndarray, count: int) -> tuple[list[list[int]], int]:
    """With loops: the positions in each row's slots, -1 in an empty one, and the number of outliers without a slot."""
    rows, overflowed_outliers = [], 0
    for row, least, most in zip(x, low, high, strict=True):
        slots = []
        for mine in ((row > most).nonzero()[0].tolist(), (row < least).nonzero()[0].tolist()):
            slots += mine[:count] + [-1] * (count - len(mine))
            overflowed_outliers += max(0, len(mine) - count)
        rows.append(slots)
    return rows, overflowed_outliers


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("rows", [1, 5, 8, 24])
@pytest.mark.parametrize("length", LENGTHS)
def test_first_beyond_takes_the_first_by_position_and_counts_the_rest(length, rows, strided):
    """Rows as of values (contiguous), and channels over tokens as of keys (strided)."""
    x = randn(1, 2, length, rows, seed=length).mT if strided else randn(1, 2, rows, length, seed=length)
    assert x.is_contiguous() is (not strided) or 1 in (rows, length)
    draw = randn(2, 2, rows, 1, seed=1 + length)
    for low, high in (
        (draw[0].abs().neg(), draw[1].abs()),  # of each row
        (torch.tensor(-0.3), torch.tensor(0.2)),
        (torch.tensor(-9.0), torch.tensor(9.0)),  # none
        (torch.tensor(9.0), torch.tensor(-9.0)),  # all, on both sides
        (x[..., :1], x[..., :1]),  # equal is not beyond
    ):
        for count in (0, 1, 3, length // 2, length + 2):
            before = x.clone()
            positions, used, overflowed_outliers = first_beyond(x, low, high, count)
            assert positions.shape == used.shape == (1, 2, rows, 2 * count)
            assert (
                positions.dtype == overflowed_outliers.dtype == torch.int64
                and used.dtype == torch.bool
                and overflowed_outliers.ndim == 0
            )
            assert torch.equal(x, before)
            ends = (end.expand(1, 2, rows, 1).reshape(-1, 1).numpy() for end in (low, high))
            expected, left = beyond_by_hand(x.flatten(0, 2).numpy(), *ends, count)
            assert int(overflowed_outliers) == left
            assert (positions[~used] == 0).all()
            assert torch.where(used, positions, -1).flatten(0, 2).tolist() == expected


def test_thresholds_of_every_entry():
    """Each channel has its own thresholds, and rows are tokens."""
    x, low, high = randn(1, 1, 4, 40), -randn(40, seed=1).abs(), randn(40, seed=2).abs()
    positions, used, overflowed_outliers = first_beyond(x, low, high, 6)
    ends = (end.expand(4, -1).numpy() for end in (low, high))
    expected, left = beyond_by_hand(x[0, 0].numpy(), *ends, 6)
    assert torch.where(used, positions, -1)[0, 0].tolist() == expected and int(overflowed_outliers) == left > 0


@pytest.mark.parametrize("shape", [(3, 16), (3, 200), (8, 64), (5, 8)])
def test_marks_are_counted_eight_at_a_time(shape):
    for marked in (torch.ones(2, *shape, dtype=torch.bool), randn(2, *shape) > 0):
        expected = marked.unflatten(-1, (-1, 8)).long().sum(-1)
        assert torch.equal(run_counts(marked).long(), expected)
        assert torch.equal(run_counts(marked.mT.contiguous().mT).long(), expected)


# --- products


def entries(rows: int, count: int, source: int, target: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    positions = (torch.randint(most, (rows, count), generator=draw) for most in (source, target))
    return *positions, randn(rows, count, seed=seed)


@pytest.mark.parametrize(
    ("rows", "n", "width", "size", "count"), [(1, 1, 4, 3, 50), (3, 7, 20, 5, 40), (2, 3, 5, 6, 0)]
)
def test_a_sparse_product_is_the_product_with_the_whole_matrix(rows, n, width, size, count, monkeypatch):
    """Entries with equal positions add up. Results do not depend on the tile, even of one row."""
    x, (source, target, delta) = randn(rows, n, width, seed=1), entries(rows, count, width, size)
    matrix = np.zeros((rows, width, size))
    for row in range(rows):
        np.add.at(matrix[row], (source[row].numpy(), target[row].numpy()), delta[row].double().numpy())
    expected = x.double().numpy() @ matrix
    before = [part.clone() for part in (x, source, target, delta)]
    found = sparse_product(x, source, target, delta, size)
    assert found.dtype == torch.float32 and found.shape == (rows, n, size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_FOLD * max(1, abs(expected).max(initial=0)))
    for tile in (1, 2 * rows * count, 2**40):
        monkeypatch.setattr(reference, "TILE_ELEMENTS", tile)
        assert torch.equal(sparse_product(x, source, target, delta, size), found)
    assert all(torch.equal(*pair) for pair in zip(before, (x, source, target, delta), strict=True))


def test_products_at_once_are_bounded(monkeypatch):
    """100 products per row of x and 700 per tile: seven rows at once."""
    x, (source, target, delta) = randn(2, 30, 9), entries(2, 50, 9, 4)
    most, gather = [], torch.Tensor.gather
    monkeypatch.setattr(reference, "TILE_ELEMENTS", 700)
    monkeypatch.setattr(
        torch.Tensor, "gather", lambda *args: most.append(args[2].numel()) or gather(*args), raising=True
    )
    sparse_product(x, source, target, delta, 4)
    assert most == [700] * 4 + [200]


# --- lists of rows


@pytest.mark.parametrize("listed", [by_token, by_channel])
@pytest.mark.parametrize(
    ("tokens", "channels", "heads", "count"),
    [(1300, 24, 2, 900), (512, 16, 3, 1), (1, 8, 1, 3), (40, 128, 2, 400), (1024, 16, 2, 5000), (600, 300, 1, 0)],
)
def test_lists_of_rows_are_the_entries(tokens, channels, heads, count, listed):
    """Lists give back the entries they were made from; also with unused room behind them, and in a batch. Entries with delta 0 are
    unused and come last."""
    draw = torch.Generator().manual_seed(count)
    flat = torch.randperm(heads * tokens * channels, generator=draw)[:count]
    delta = torch.randn(count, generator=draw)
    delta[::7] = 0
    given = Entries(flat // (tokens * channels), flat // channels % tokens, flat % channels, delta)
    dense = torch.zeros(heads, tokens, channels).index_put_((given.head, given.token, given.channel), delta)
    fields = listed(given, heads, tokens, channels)
    more = {"delta": 13, "index": 13, "starts": 3, "begins": 3 * span_of(channels)}
    room = {name: F.pad(part, (0, more[name])).expand(2, -1, -1, -1) for name, part in fields.items()}
    words = {name for name in room if name == "begins" or (name == "index" and listed is by_channel)}
    room = {name: part.to(torch.int16) if name in words else part.contiguous() for name, part in room.items()}
    for held, longest in ((fields, tokens), (room, tokens), (room, tokens + 900)):
        token, channel, distance = numbers_of(held, channels, longest)
        assert bool((token < heads * longest).all() and (channel < heads * channels).all())
        for row in range(len(distance)):
            found = torch.zeros(heads * longest, heads * channels)
            found.index_put_((token[row], channel[row]), distance[row], accumulate=True)
            found = found.view(heads, longest, heads, channels).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            assert torch.equal(found[:, :tokens], dense) and not found[:, tokens:].any()


def test_what_lies_behind_a_list_is_cleared():
    """Anything may follow the last entry of a list that was read from a file: it is set to 0."""
    given = Entries(*(torch.tensor([0, 0, 1]) for _ in range(3)), torch.tensor([1.0, 0, 3]))
    for listed in (by_token, by_channel):
        fields = listed(given, 2, 4, 8)
        kept = {name: part.clone() for name, part in fields.items()}
        fields["delta"][..., 2], fields["index"][..., 2] = 7, 5
        cleared_behind(fields, 8)
        assert all(torch.equal(part, kept[name]) for name, part in fields.items())


def test_spans():
    assert [span_of(channels) for channels in (1, 64, 128, 129, 256, 1024)] == [512, 512, 512, 256, 256, 64]
