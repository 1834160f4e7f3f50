"""The kernel that attends pages in one pass, interpreted, against attention over the decoded tokens of the pages in float64."""

from dataclasses import replace

import pytest
import torch
from attended_by_kernel import asked, assert_same, whole
from paged_attention import EXACT_TYPES, Kind, Pages, attention, pages_of
from tolerances import SPLIT_SCORES

from calib.kernels.attend import operation, triton

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

WIDTHS = (1, 2, 3, 4, 8)
LAYOUTS = [
    ("fixed", 1),
    *(("token", groups) for groups in (1, 2, 4)),
    *(("channel", size) for size in (16, 32, 64, 128)),
]
PACKED = [Kind(bits, *layout) for bits in WIDTHS for layout in LAYOUTS]
# Groups of channels have to consist of whole planes: with 3 bits there are 5 planes, with 8 bits 2.
SERVED = [kind for kind in PACKED if kind.parameters != "token" or (16 // kind.bits) % kind.size == 0]
KINDS = [*SERVED, *(Kind(name) for name in EXACT_TYPES)]
DIMS = (32, 64, 80, 96, 128, 256)

FOUR, FEW = Kind(4, "token", 2), Kind(2, "channel", 32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that unwritten numbers are noticed. One program reads all pages of a head, unless a
    test sets more."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "room", lambda shape, like: torch.full(shape, torch.nan))
    monkeypatch.setattr(triton, "_programs", lambda device: 1)


def fits(kind: Kind, channels: int) -> bool:
    """Whether the channels fill all planes of a token's words, which groups of channels require."""
    return kind.parameters != "token" or kind.size == 1 or channels % (16 // kind.bits) == 0


def pair(keys: Kind, values: Kind, channels: int = 32, heads: int = 2, count: int = 3, **sizes) -> tuple[Pages, Pages]:
    page = next((page for page in (64, 96, 128) if page % keys.size == page % values.size == 0), 0)
    shape = (count, heads, page, channels)
    return pages_of(keys, shape, 1, **sizes), pages_of(values, shape, 2, **sizes)


@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda number: str(KINDS[number]))
def test_kinds(number, monkeypatch):
    """Each kind once as keys and once as values. Channels, query rows, used slots, precision and the number of programs vary with
    the case's number."""
    monkeypatch.setattr(triton, "_programs", lambda device: 1 + 3 * (number % 3 == 0))
    kinds = KINDS[number], KINDS[(17 * number + 5) % len(KINDS)]
    possible = [size for size in DIMS if all(fits(kind, size) for kind in kinds)]
    keys, values = pair(*kinds, possible[number % len(possible)])
    query = asked(keys, query_rows=1 + number % 5)
    assert_same(query, keys, values, whole(keys, [2, 1], used=[64 + 7 * number % 64]), precise=number % 2 == 0)


@pytest.mark.parametrize("channels", DIMS)
def test_exact_keys_and_packed_values(channels):
    keys, values = pair(Kind("float16"), Kind(2, "token"), channels)
    assert_same(asked(keys), keys, values, whole(keys, [2, 1]), precise=True)
    keys, values = pair(FEW, Kind("bfloat16"), channels)
    assert_same(asked(keys), keys, values, whole(keys, [2]))


@pytest.mark.parametrize("query_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 65])
def test_query_rows(query_rows):
    keys, values = pair(FOUR, Kind(2, "fixed"))
    query = asked(keys, query_rows=query_rows)
    assert_same(query, keys, values, whole(keys, [1]), precise=True, scored=query_rows > 8)


@pytest.mark.parametrize("used", [1, 63, 64, 65, 191, 192])
def test_used_slots(used):
    keys, values = pair(FOUR, FEW)
    query = asked(keys)
    assert_same(query, keys, values, whole(keys, [2, 0, 1], used=[used]), precise=True, scored=used % 2 == 1)


@pytest.mark.parametrize("programs", [1, 6, 64])
def test_rows_of_different_length_in_one_and_in_many_runs(programs, monkeypatch):
    """Behind a row's own pages its table names page 0, which must not be read: its parameters are NaN."""
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    keys, values = pair(FOUR, Kind(4, "channel", 32), heads=1, count=4)
    for part in (keys, values):
        part.stream.parameters[0] = torch.nan
        part.tokens[0] = 0
    query = asked(keys, rows=3, query_rows=3)
    span = whole(keys, [3, 1, 2, 0], [1, 0, 0, 0], [0, 0, 0, 0], used=[150, 33, 0])
    assert_same(query, keys, values, span, precise=True)


@pytest.mark.parametrize("programs", [1, 64])
def test_what_lies_in_unused_slots_has_no_part(programs, monkeypatch):
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    keys, values = pair(Kind(4, "token"), Kind(4, "token"))
    used, query = 70, asked(keys)
    found = []
    for garbage in (1e-3, 6e4):
        for part in (keys, values):
            part.stream.parameters[1, :, used - 64 :] = garbage
        found.append(
            triton.attend_pages(
                query, keys.stream, values.stream, whole(keys, [2, 1], used=[used]), None, None, True, True
            )
        )
    assert all(
        torch.equal(getattr(found[0], name), getattr(found[1], name)) for name in ("top", "mass", "mixed", "scores")
    )


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("placed", [False, True], ids=["slots", "positions"])
def test_sliding_window(columns, placed):
    keys, values = pair(Kind(4, "fixed"), FOUR)
    query = asked(keys, rows=2, query_rows=4)
    positions = torch.arange(3 * 2 * 64, dtype=torch.int32).mul(89).remainder(211).view(3, 2, 64, 1) if placed else None
    # For the first query column, the window hides no token of the first row, and all of the second.
    back = torch.tensor([[-1, 40], [500, 63]], dtype=torch.int32)[:, :columns].contiguous()
    span = whole(keys, [2, 1], [0, 1], used=[128, 100], back=back, positions=positions)
    assert_same(query, keys, values, span, precise=True, scored=placed)


@pytest.mark.full
@pytest.mark.parametrize("heads", [1, 2])
def test_hidden_slots(heads):
    keys, values = pair(FEW, Kind(2, "token", 4))
    hidden = torch.rand(2, heads, 128, generator=torch.Generator().manual_seed(4)) < 0.5
    hidden[0, -1] = True  # all slots of a head
    hidden[1, :, :64] = True  # the whole first page
    query = asked(keys, rows=2)
    span = whole(keys, [2, 1], [0, 1], used=[128, 101], hidden=hidden)
    assert_same(query, keys, values, span, precise=True, scored=heads == 2)


@pytest.mark.parametrize("kind", [Kind(4, "fixed"), FOUR, FEW, Kind("float16")], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_is_added_to_scores(kind, softcap):
    keys, values = pair(kind, FOUR)
    query = asked(keys, query_rows=3)
    draw = torch.Generator().manual_seed(5)
    constant = 5 * torch.randn(1, 2, 3, 1, generator=draw)
    bias = torch.randn(1, 2, 3, 128, generator=draw)
    span = whole(keys, [2, 1], used=[90])
    assert_same(query, keys, values, span, constant=constant, softcap=softcap, precise=True)
    assert_same(
        query, keys, values, replace(span, bias=bias), constant=constant, softcap=softcap, scored=softcap is not None
    )


@pytest.mark.parametrize(
    ("size", "precise"), [(1e-4, False), (1e-4, True), (1e-2, False), (1e2, True), (1e4, False), (1e4, True)]
)
@pytest.mark.parametrize(
    "kind", [Kind(1, "fixed"), Kind(2, "token", 2), Kind(8, "channel", 32), Kind("float32")], ids=str
)
def test_sizes_of_queries(kind, size, precise):
    """Queries of order `size` against keys of order 1 / `size`; every eighth channel of the query is 100 times as large."""
    if kind.parameters in ("token", "channel"):  # the range of float16 parameters
        size = min(max(size, 1e-2), 1e2)
    keys, values = pair(kind, Kind(4, "token"), heads=1, scale=1 / size)
    query = asked(keys) * size
    query[..., ::8] *= 100
    assert_same(query / 100, keys, values, whole(keys, [2, 1], used=[100]), precise=precise)


@pytest.mark.parametrize(("size", "precise"), [(1e-4, False), (1e-2, True), (1e2, False), (1e3, False), (1e3, True)])
@pytest.mark.parametrize(
    "kind", [Kind(2, "fixed"), Kind(1, "token", 4), Kind(8, "token"), Kind(4, "channel", 32)], ids=str
)
def test_sizes_of_values(kind, size, precise):
    """The kernel divides scales by the largest one so far, so that float16 neither overflows nor underflows."""
    if kind.bits == 8:  # so that float16 has enough bits for the scales
        size *= 10
    keys, values = pair(Kind(4, "fixed"), kind, heads=1)
    values = pages_of(kind, tuple(values.tokens.shape), 2, scale=size)
    assert_same(asked(keys), keys, values, whole(keys, [2, 1], used=[100]), precise=precise)


@pytest.mark.full
def test_parameters_that_all_heads_share():
    for kind in (Kind(4, "fixed"), FOUR, FEW):
        keys, values = pair(kind, kind, shared=True)
        assert kind.parameters == "fixed" or keys.stream.parameters.shape[1] == 1
        assert_same(asked(keys), keys, values, whole(keys, [2, 1]), precise=True)


@pytest.mark.full
def test_groups_of_tokens_that_are_no_power_of_two():
    keys, values = pair(Kind(4, "channel", 48), Kind(2, "channel", 32))
    assert_same(asked(keys), keys, values, whole(keys, [2, 1], used=[150]), precise=True)


def test_pages_and_heads_of_any_stride():
    """Pages are every second one of a larger tensor, and in memory heads come before pages."""
    keys, values = pair(FOUR, Kind("float32"), count=4)
    words, parameters = (
        part.transpose(0, 1).contiguous().transpose(0, 1) for part in (keys.stream.pages, keys.stream.parameters)
    )
    keys = replace(keys, stream=replace(keys.stream, pages=words, parameters=parameters))
    values = Pages(replace(values.stream, pages=values.stream.pages[1::2]), values.tokens[1::2])
    query = asked(keys).mT.contiguous().mT
    assert_same(query, keys, values, whole(keys, [0, 1]), precise=True)


def test_precise_is_precise():
    """With `precise` (22 bits of a factor, not 11) the error is at least 20 times smaller."""
    keys, values = pair(Kind(4, "fixed"), FOUR)
    query, span = asked(keys, size=8.0), whole(keys, [2, 1])
    expected = attention(query, keys, values, span)
    wrong = []
    for precise in (True, False):
        found = assert_same(query, keys, values, span, precise=precise)
        wrong.append((found.mixed / found.mass - expected.output).abs().amax())
    assert wrong[0] * 20 < wrong[1]


def test_what_is_served(monkeypatch):
    keys, values = pair(FOUR, FEW)
    monkeypatch.delenv("CALIB_KERNELS")
    assert not operation.supported(2, keys.stream, values.stream)  # on a CPU Triton has to be asked for
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    assert operation.supported(2, keys.stream, values.stream)
    assert operation.supported(triton.MOST_ROWS, keys.stream, values.stream)
    assert not operation.supported(triton.MOST_ROWS + 1, keys.stream, values.stream)
    assert not operation.supported(2, None, values.stream) and not operation.supported(2, keys.stream, None)
    for kind in PACKED:
        stream = pages_of(kind, (1, 1, 128, 64), 0).stream
        assert (
            operation.supported(2, stream, values.stream)
            == operation.supported(2, keys.stream, stream)
            == (kind in SERVED)
        ), kind
    for other in (
        replace(keys.stream, parameters=keys.stream.parameters.float()),
        replace(keys.stream, bits=5),
        pages_of(Kind(4, "channel", 8), (1, 1, 64, 64), 0).stream,
        replace(keys.stream, bits=16),
        replace(keys.stream, bits=16, parameters=None),
        pages_of(Kind(1, "token", 4), (1, 1, 64, 24), 0).stream,  # planes that 24 channels do not fill
        replace(keys.stream, parameters=torch.ones(1, 2, 1, 2).half(), group_tokens=64),  # one scale of a whole page
    ):
        assert not operation.supported(2, other, values.stream)


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("kind", [Kind(4, "fixed"), FOUR, FEW], ids=str)
def test_scores_of_keys_ahead(kind, programs, monkeypatch):
    """`ahead`: scores of 70 keys behind the attended ones. The second row's table ends after 42 of them: the rest is not written.
    The attention output is that of a launch without `ahead`."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    keys, values = pair(kind, FOUR)
    query, span = asked(keys, rows=2, query_rows=3), whole(keys, [2, 0, 1], [1, 2, 0], used=[40, 150])
    given = query, keys.stream, values.stream
    found, plain = (operation.attend_pages(*given, span, softcap=4.0, precise=True, ahead=ahead) for ahead in (70, 0))
    whole_span = replace(span, used=span.used + torch.tensor([70, 42], dtype=torch.int32))
    everything = attention(query, keys, values, whole_span)
    assert found.scores is None and found.ahead.shape == (2, 2, 3, 70) and plain.ahead is None
    for row, (used, count) in enumerate([(40, 70), (150, 42)]):
        wrong = (found.ahead[..., :count].double() - everything.scores[..., used : used + count])[row]
        assert (wrong.abs() <= SPLIT_SCORES * everything.terms[row]).all()
    assert found.ahead[1, :, :, 42:].isnan().all()
    torch.testing.assert_close(found.mixed / found.mass, plain.mixed / plain.mass, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("programs", [1, 64])
def test_scores_of_all_slots_and_of_keys_ahead(programs, monkeypatch):
    """One launch with `scored` and `ahead` returns the same bits as a launch of each. Scores ahead are neither masked nor
    capped."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "_programs", lambda device: programs)
    keys, values = pair(FEW, FOUR)
    query, span = asked(keys, rows=2, query_rows=3), whole(keys, [2, 0, 1], [1, 2, 0], used=[40, 150])
    hidden = torch.rand(2, 2, 3 * keys.stream.pages.shape[2], generator=torch.Generator().manual_seed(0)) < 0.3
    given, options = (
        (query, keys.stream, values.stream, replace(span, hidden=hidden)),
        {"softcap": 4.0, "precise": True},
    )
    both = operation.attend_pages(*given, **options, ahead=70, scored=True)
    scored, ahead = (operation.attend_pages(*given, **options, **one) for one in ({"scored": True}, {"ahead": 70}))
    assert torch.equal(both.scores, scored.scores) and both.scores.isneginf().any()
    assert torch.equal(both.ahead.nan_to_num(7), ahead.ahead.nan_to_num(7)) and both.ahead.is_contiguous()
    # Turns with only keys ahead add nothing to the mixture, but rescale it once more, which rounds.
    assert torch.equal(both.mass, scored.mass)
    for one in (scored, ahead):
        torch.testing.assert_close(both.mixed / both.mass, one.mixed / one.mass, rtol=1e-5, atol=1e-5)
