"""Quantisation and packing by the interpreted kernels against plain torch: every bit is the same."""

import pytest
import torch
import triton
import triton.language as tl
from launches import watch

from calib.kernels.pack.reference import unpack
from calib.kernels.quantise import arithmetic, operation
from calib.kernels.quantise import triton as kernels
from calib.kernels.quantise.prologue import IDENTITY, Prologue

# Padding lanes compute with infinities, of which only the interpreter warns.
pytestmark = [pytest.mark.arithmetic, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("normal", "outlier channel", "offset", "steps", "constant", "zero", "large", "tiny")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with NaN, or with -21555, so that unwritten numbers are noticed."""

    def buffer(shape, dtype, device):
        return torch.full(shape, torch.nan if dtype.is_floating_point else -21555, dtype=dtype, device=device)

    monkeypatch.setattr(kernels, "new_buffer", buffer)


def tokens(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "normal", seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier channel":
        x[..., 0] *= 100
    elif kind == "offset":
        x = x * 0.01 + 40
    elif kind == "steps":  # ties, and equal values
        x = (x * 2).round() / 4
    elif kind == "constant":
        x = torch.full_like(x, 9001.3)  # not a float16 number, and the step is 0
    elif kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "large":
        x = (x * 3e4).clamp(-65504, 65504)
    elif kind == "tiny":
        x = x * 1e-6
    return x.to(dtype)


def assert_same_uniform(x, group, bits, clip=1.0, dtype=torch.float16, across_heads=False, prologue=IDENTITY):
    kept = x.clone()
    assert kernels.supports(x, clip, prologue)
    words, parameters = kernels.encode_uniform(x, group, bits, clip, dtype, across_heads, prologue)
    expected = operation.encode_uniform(x, group, bits, clip, dtype, across_heads, prologue)
    assert words.dtype == torch.int16 and parameters.dtype == dtype
    assert torch.equal(parameters, expected[1]), (group, bits, dtype)
    assert torch.equal(words, expected[0]), (group, bits, dtype)
    assert torch.equal(x, kept)


def case(*numbers: int) -> tuple[torch.dtype, str]:
    """A dtype and a kind of tokens; neighbouring cases get different ones."""
    at = sum(number * (i + 1) for i, number in enumerate(numbers))
    return DTYPES[at % 3], KINDS[at % len(KINDS)]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
def test_parameters_per_token(channels, bits):
    sizes = [size for size in (channels // 2, 32, 16, 8) if channels % size == 0]
    for number, size in enumerate((channels, sizes[bits % len(sizes)])):
        dtype, kind = case(channels // 16, bits, number)
        assert_same_uniform(tokens((1, 1, 5, channels), dtype, kind), (1, size), bits)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
def test_parameters_per_channel(channels, bits):
    dtype, kind = case(channels // 16, bits)
    assert_same_uniform(tokens((1, 1, 32, channels), dtype, kind), (32, 1), bits)


@pytest.mark.parametrize("size", [1, 2, 20, 63, 128, 130])
def test_blocks_of_any_length(size):
    dtype, kind = case(size)
    assert_same_uniform(tokens((1, 2, 2 * size, 32), dtype, kind), (size, 1), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [(1, 64), (1, 16), (32, 1)])
def test_kinds_of_tokens(kind, group):
    dtype = DTYPES[(KINDS.index(kind) + group[0] + group[1]) % 3]
    assert_same_uniform(tokens((1, 1, 32, 64), dtype, kind, seed=1), group, 4, 0.8)
    x = tokens((1, 2, 32, 64), torch.float16, kind, seed=1)
    assert_same_uniform(x, group, 8, torch.tensor([0.3, 0.9]).view(2, 1, 1))


@pytest.mark.parametrize("length", [1, 63, 1000])
@pytest.mark.parametrize("bits", [4, 8])
def test_odd_lengths(length, bits):
    x = tokens((1, 1, length, 32), torch.float16)
    assert_same_uniform(x, (1, 32), bits)
    assert torch.equal(kernels.encode_fixed(x, bits, 2.0), operation.encode_fixed(x, bits, 2.0))


@pytest.mark.parametrize("group", [(4, 4), (5, 32), (1, 10), (1, 20), (40, 80)])
def test_groups_that_no_kernel_measures(group):
    for bits in (3, 4):
        assert_same_uniform(tokens((1, 2, 40, 160), torch.bfloat16), group, bits)


def test_groups_across_heads():
    assert_same_uniform(tokens((2, 3, 8, 32), torch.float16), (1, 32), 8, across_heads=True)
    assert_same_uniform(tokens((2, 3, 8, 32), torch.float16), (8, 32), 4, 0.5, across_heads=True)


@pytest.mark.parametrize(("group", "bits"), [((1, 32), 8), ((1, 64), 4), ((16, 1), 1), ((16, 1), 8), ((8, 8), 4)])
def test_wide_parameters(group, bits):
    x = tokens((1, 2, 16, 64), torch.float32, seed=2)
    x[0, 0] *= 1e6  # the parameters of this head are beyond float16's range
    assert_same_uniform(x, group, bits, dtype=torch.float32)
    assert_same_uniform(x, group, bits)  # clamped


def test_other_numbers_of_bits():
    x = tokens((1, 2, 32, 48), torch.float16)
    for bits in (5, 6, 7):
        assert_same_uniform(x, (1, 48), bits)
        assert_same_uniform(x, (32, 1), bits)


def test_strides():
    x = tokens((2, 32, 3, 64), torch.float16).transpose(1, 2)  # the memory layout of a projection
    assert_same_uniform(x, (1, 32), 8)
    assert_same_uniform(x, (32, 1), 8)
    assert_same_uniform(x.mT[..., 3:35, ::2].mT, (1, 32), 4)
    assert_same_uniform(x[:1].expand(3, -1, -1, -1)[..., ::2], (32, 1), 8)


def prologues(rows: int, heads: int, length: int, channels: int) -> dict[str, Prologue]:
    draw = torch.Generator().manual_seed(5)
    order = torch.stack([torch.randperm(length, generator=draw) for _ in range(rows * heads)]).view(rows, heads, length)
    center, half = (
        torch.randn(rows, heads, 1, channels, generator=draw),
        0.3 + torch.rand(heads, 1, channels, generator=draw),
    )
    return {
        "all": Prologue(order[..., : length // 2], center, half, half.half()),
        "range": Prologue(center=center, half=half.expand(rows, heads, 1, channels)),
        "half range, in order": Prologue(order[..., ::2], center.half(), half.half()),
        "scale": Prologue(half=half),
        "scale, in part 0": Prologue(half=half.masked_fill(half < 0.6, 0.0)),
        "balance": Prologue(balance=half.bfloat16()),
        "order": Prologue(order=order),
    }


def test_a_scale_of_0_divides_by_1():
    x, half = tokens((1, 1, 4, 6), torch.float16), torch.tensor([2.0, 0.0, 0.5, 0.0, 4.0, 1.0]).view(1, 1, 6)
    assert torch.equal(Prologue(half=half).forward(x), x.float() / torch.tensor([2.0, 1.0, 0.5, 1.0, 4.0, 1.0]))


@pytest.mark.parametrize("name", prologues(2, 2, 32, 80))
def test_gathered_and_transformed_on_the_way(name):
    prologue, clip = prologues(2, 2, 32, 80)[name], torch.tensor([0.7, 1.1]).view(2, 1, 1)
    x = tokens((2, 2, 32, 80), torch.bfloat16)
    assert torch.equal(kernels.encode_fixed(x, 4, clip, prologue), operation.encode_fixed(x, 4, clip, prologue))
    assert_same_uniform(x, (1, 80), 8, 0.9, prologue=prologue)
    assert_same_uniform(x.half(), (4, 8), 8, clip, prologue=prologue)
    assert_same_uniform(x.float(), (16, 1), 8, clip, prologue=prologue)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
def test_calibrated_ranges(channels, bits):
    dtype, kind = case(channels // 16, bits)
    x = tokens((1, 2, 7, channels), dtype, kind)
    clip = 0.83 if channels % 64 else 0.1 + torch.rand(2, 1, 1, generator=torch.Generator().manual_seed(bits))
    words = kernels.encode_fixed(x, bits, clip)
    assert words.dtype == torch.int16
    assert torch.equal(words, operation.encode_fixed(x, bits, clip))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_division_is_exact_where_it_decides(dtype):
    """500 steps; values on the border between two codes, and the float32 numbers next to it, for the first 31 borders."""
    draw = torch.Generator().manual_seed(3)
    count = 500
    scale = (torch.rand(count, generator=draw) * 2 + 1e-3).to(dtype).float()
    scale = (
        torch.where(torch.rand(count, generator=draw) < 0.5, scale, scale * 65504 / 2)
        if dtype == torch.float32
        else scale
    )
    border = torch.arange(1, 32) - 0.5
    exact = (scale[:, None].double() * border).float()
    near = [exact, *(torch.nextafter(exact, torch.full_like(exact, end)) for end in (-torch.inf, torch.inf))]
    below = scale[:, None] * torch.tensor([-1e30, -3.0, -0.5])  # codes 0
    x = torch.cat([*near, scale[:, None], below, 1e30 * scale[:, None]], -1)[None, None]  # [1, 1, count, 98]
    zeros = torch.zeros(1, 1, count, 1)
    parameters = torch.cat([scale[None, None, :, None], zeros], -1).to(
        dtype if dtype == torch.float16 else torch.float32
    )
    words = kernels.new_buffer((1, 1, count, 49), torch.int16, "cpu")
    kernels._by_planes(x, words, 8, IDENTITY, None, parameters, (1, x.shape[-1]), False)
    expected = (x / scale[:, None] + 0.5).floor().clamp(0, 255)
    assert torch.equal(unpack(words, 8, x.shape[-1]).float(), expected)


@triton.jit
def divided(x, divisors, found, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(found + at, arithmetic.quotient(tl.load(x + at), tl.load(divisors + at).to(tl.float32), True))


def test_a_quotient_by_a_float16_number_is_rounded_to_nearest():
    """Division by nearly all positive float16 numbers, of numbers of order 2^-40 to 2^40, has the bits of float32 division."""
    divisors = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)
    divisors = divisors[: len(divisors) // 1024 * 1024]
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(len(divisors), generator=draw) * 2.0 ** torch.randint(-40, 40, divisors.shape, generator=draw)
        found = torch.empty_like(x)
        divided[(len(divisors) // 1024,)](x, divisors, found, 1024)
        assert torch.equal(found, x / divisors.float())


def test_the_operation_takes_the_kernel_where_it_is_forced(monkeypatch):
    x = tokens((1, 2, 32, 64), torch.float16)
    expected = operation.encode_uniform(x, (32, 1), 2, 1.0, torch.float16), operation.encode_fixed(x, 2, 1.0)
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(operation, "quantise", None)  # the plain form is not touched
    found = operation.encode_uniform(x, (32, 1), 2, 1.0, torch.float16), operation.encode_fixed(x, 2, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True)) and torch.equal(
        found[1], expected[1]
    )


def test_what_the_kernels_leave_to_the_reference():
    x = torch.randn(2, 2, 8, 32)
    assert not kernels.supports(x[0], 1.0) and not kernels.supports(x[:, :, :0], 1.0)
    assert not kernels.supports(x.double(), 1.0) and not kernels.supports(x, torch.ones(2, 2, 1, 1))
    assert not kernels.supports(torch.randn(1, 1, 2, 1024), 1.0)
    assert not kernels.supports(x, 1.0, Prologue(order=torch.zeros(2, 2, 0, dtype=torch.int64)))


def test_a_group_that_does_not_divide_is_refused():
    for group in ((1, 5), (3, 1)):
        with pytest.raises(ValueError, match=r"8 x 32, got \("):
            operation.encode_uniform(torch.randn(1, 1, 8, 32), group, 2, 1.0, torch.float16)


@pytest.mark.parametrize("sign", [1, -1])
def test_lanes_that_hold_no_channel_change_no_range(sign):
    x = sign * tokens((1, 1, 20, 80), torch.float16, "offset")  # a plane of 4 bits has 20 channels, a tile 32
    assert_same_uniform(x, (1, 80), 4)
    assert_same_uniform(x, (1, 10), 4)
    assert_same_uniform(x, (20, 1), 4)


@pytest.mark.full
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("clips", [(1.0, 0.8), "heads"])
def test_two_tensors_are_encoded_by_one_launch(bits, clips, monkeypatch):
    """Each tensor has the bits that it has alone. Tensors with different strides take two launches."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    pair = tuple(tokens((3, 2, 1, 64), torch.bfloat16, kind, bits) for kind in ("normal", "offset"))
    if clips == "heads":
        clips = tuple(torch.tensor([share, 1.0]).view(2, 1, 1) for share in (0.9, 0.7))
    launched = watch(monkeypatch, "quantise")
    for given, launches in ((pair, 1), ((pair[0], pair[1].repeat(1, 1, 2, 1)[:, :, :1]), 2)):
        launched.clear()
        found = operation.encode_pair(given, 64, bits, clips, torch.float16)
        assert len(launched) == launches
        for (words, parameters), x, clip in zip(found, given, clips, strict=True):
            own = operation.encode_uniform(x, (1, 64), bits, clip, torch.float16)
            assert torch.equal(words, own[0]) and torch.equal(parameters, own[1])
