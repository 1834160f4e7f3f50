"""Per-channel statistics of a prompt: the kernel in Triton's interpreter against plain torch, bit for bit."""

import pytest
import torch
from torch import Tensor

from calib.kernels.channel_ranges import operation, reference

pytestmark = pytest.mark.arithmetic

triton = pytest.importorskip("calib.kernels.channel_ranges.triton", reason="Triton is not installed")

KINDS = ("range", "root", "positive root", "balance")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KEPT = (torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, so that numbers which the kernel did not write are noticed."""
    empty = torch.empty
    monkeypatch.setattr(triton.torch, "empty", lambda *shape, **of: empty(*shape, **of).fill_(torch.nan))


@pytest.fixture(autouse=True)
def nearest(monkeypatch):
    """Roots are rounded to nearest, as on a GPU."""
    monkeypatch.setattr(reference, "root", lambda x: x.double().sqrt().float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_roots_of_a_cpu_are_within_a_unit_of_16_bits(dtype, monkeypatch):
    x = drawn((2, 8, 50, 128), dtype)
    nearest = reference.measured("root", x, torch.float16)[0].view(torch.int16)
    monkeypatch.undo()
    found = reference.measured("root", x, torch.float16)[0].view(torch.int16)
    assert (found - nearest).abs().max() <= 1 and (found != nearest).float().mean() < 0.01


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> Tensor:
    """A slice of a tensor that is NaN elsewhere. Channels from small to large, one all +0, one constant, one negative."""
    rows, heads, tokens, width = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.logspace(-9, 4, width)[torch.randperm(width, generator=draw)]
    x[..., 0], x[..., 1], x[..., 2] = 0, 0.3, -x[..., 2].abs()
    around = torch.full((rows, tokens + 3, heads, width + 5), torch.nan, dtype=dtype)
    return around.transpose(1, 2)[:, :, 1:-2, 2:-3].copy_(x.to(dtype) + 0.0)


def order_of(shape: tuple[int, ...], count: int) -> Tensor:
    """Numbers of `count` random tokens for each row and head."""
    draw = torch.Generator().manual_seed(count)
    return torch.rand(shape[:3], generator=draw).argsort(-1)[..., :count]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all numbers have the same bits, or are NaN in both."""
    assert len(found) == len(expected)
    bits = {torch.float16: torch.int16, torch.float32: torch.int32}
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        equal = (mine.view(bits[mine.dtype]) == other.view(bits[mine.dtype])) | (mine.isnan() & other.isnan())
        if not equal.all():
            return False
    return True


@pytest.mark.full
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "group"), [((2, 2, 40, 128), 2), ((1, 2, 300, 80), 1), ((1, 1, 1, 64), 8), ((3, 1, 63, 6), 5)], ids=str
)
def test_the_same_bits(shape, group, kind, dtype, kept):
    tokens, query = drawn(shape, dtype), drawn((shape[0], shape[1] * group, shape[2] + 1, shape[3]), dtype, 2)
    given = (kind, tokens, kept, None, query)
    assert same(triton.measured(*given), reference.measured(*given))
    known = triton.extremes_of(tokens, shape[1])
    low, high = known.amin(2).unbind(2)[0], known.amax(2).unbind(2)[1]
    assert torch.equal(low, tokens.amin(2).float()) and torch.equal(high, tokens.amax(2).float())
    away = torch.full_like(tokens, torch.nan)  # with known extremes tokens are not read
    assert same(triton.measured(kind, away, kept, None, query, None, known), reference.measured(*given))
    given = (kind, tokens, kept, order_of(shape, max(1, shape[2] // 3)), query)
    assert same(triton.measured(*given), reference.measured(*given))


@pytest.mark.full
@pytest.mark.parametrize("width", [96, 256])
@pytest.mark.parametrize("tokens", [1, 17, 410])
def test_parts_of_any_number_of_tokens(tokens, width, monkeypatch):
    """Partly filled turns, parts and tiles; the extremes are in the last token of one head and in the first of the other."""
    monkeypatch.setattr(triton, "PROGRAMS", 9)
    x = drawn((1, 2, tokens, width), torch.bfloat16)
    x[:, 0, -1, 3:], x[:, 1, 0, 3:] = 2e4, -3e4
    order = order_of(x.shape, -(-tokens // 2))
    for kind in ("range", "root"):
        for own in (None, order):
            given = (kind, x, torch.float16, own)
            assert same(triton.measured(*given), reference.measured(*given))


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_the_range(kind, kept):
    """Numbers beyond and at the ends of float16's range, the largest and smallest of float32, infinities and NaN; and tokens that
    are all 0 or all NaN."""
    x = drawn((1, 1, 40, 16), torch.float32)
    ends = [
        65504.0,
        65519.0,
        65520.0,
        7e4,
        3e38,
        -3e38,
        torch.inf,
        -torch.inf,
        torch.nan,
        1e-40,
        2.0**-24,
        2.0**-25,
        1e-30,
    ]
    for channel, end in enumerate(ends):
        x[0, 0, channel % 7 * 5, channel] = end
    x[..., 13] = 0
    query = x.flip(-1).repeat(1, 2, 1, 1)
    for tokens in (x, torch.zeros_like(x), torch.full_like(x, torch.nan)):
        given = (kind, tokens, kept, None, query)
        assert same(triton.measured(*given), reference.measured(*given))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_written_into_tensors_that_are_given(kind):
    x, query = drawn((2, 2, 30, 64), torch.bfloat16), drawn((2, 4, 30, 64), torch.bfloat16, 2)
    expected = reference.measured(kind, x, torch.float16, None, query)
    for form in (triton, operation):
        of_more = [torch.full((4, 2, 1, 64), torch.nan, dtype=torch.float16) for _ in expected]
        found = form.measured(kind, x, torch.float16, None, query, [own[1:3] for own in of_more])
        for mine, own, other in zip(found, of_more, expected, strict=True):
            assert torch.equal(own[1:3], other) and mine.data_ptr() == own[1:3].data_ptr()
            assert own[::3].isnan().all()


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_runs_what_serves(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked, original = [], triton.measured
    monkeypatch.setattr(triton, "measured", lambda *given: asked.append(given) or original(*given))
    x, order = drawn((1, 2, 9, 16), torch.float16), order_of((1, 2, 9), 4)
    given = ("range", x, torch.float16, order)
    assert same(operation.measured(*given), reference.measured(*given))
    assert len(asked) == (forced == "triton")
    asked.clear()
    operation.measured("range", x.mT.contiguous().mT, torch.float16, order)  # a channel's tokens side by side
    operation.measured("range", x.double(), torch.float16, order)
    operation.measured("root", x, torch.float16, order.mT.contiguous().mT)
    operation.measured("balance", x, torch.float16, None, x.repeat(1, triton.PARTS + 1, 1, 1))
    operation.measured("root", x, torch.float16, None, None, [torch.empty(1, 2, 1, 32, dtype=torch.float16)[..., ::2]])
    operation.measured("root", drawn((1, 1, 2, triton.WIDEST + 1), torch.float16), torch.float16)
    for nothing, own in ((x[:, :, :0], None), (x, order[..., :0])):
        with pytest.raises(IndexError, match="dim 2 to have non-zero size"):
            operation.measured("range", nothing, torch.float16, own)
    assert not asked
