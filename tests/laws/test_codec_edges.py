"""Codecs at the edges: ties, midpoints, constants, zeros, the largest values, and options that do not exist."""

import oracle
import pytest
import torch
from tolerances import FLOAT32

from calib.kernels.quantise.reference import quantise
from calib.runtime.stages.codec import UniformQuant

pytestmark = pytest.mark.arithmetic

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = [(1, None), (1, 8), (8, 1), (4, 4), (None, 1), (None, None), (2, 16), None]


@pytest.mark.parametrize("bits", range(1, 9))
def test_ties_go_to_the_upper_level(bits):
    levels = 2**bits
    # Range 0 ... 4 (levels - 1): scale 4 exactly, and every odd multiple of 2 lies halfway between two levels.
    x = torch.arange(0, 4 * (levels - 1) + 1, 2, dtype=torch.float32)
    codec = UniformQuant(bits, (1, None))
    block = codec.encode(x[None, None, None])
    assert block["parameters"].tolist() == [[[[4, 0]]]]  # scale, zero point
    expected = [min((int(value) + 2) // 4, levels - 1) for value in x]
    assert oracle.unpacked(block["words"].numpy(), bits, len(x))[0, 0, 0].tolist() == expected


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_clip_of_1_minus_2_to_the_minus_bits_puts_levels_in_the_middle_of_equal_cells(bits):
    cells = 2**bits
    x = (torch.arange(4 * cells + 1, dtype=torch.float32) / 4).view(1, 1, 1, -1)  # 0 ... 2^bits: cells of width 1
    codec = UniformQuant(bits, (1, None), clip=1 - 2.0**-bits)
    block = codec.encode(x)
    assert block["parameters"].tolist() == [[[[1, 0.5]]]]
    expected = x.floor().clamp(max=cells - 1) + 0.5
    assert torch.equal(codec.decode(block, x.shape[-1]), expected)


def test_one_bit_at_clip_one_half_is_specache_equation_3():
    # Multiples of 1/64 below 4: every parameter is a float16 number, so that nothing is rounded and all is equal.
    x = torch.randn(2, 2, 16, 32, generator=torch.Generator().manual_seed(0)).mul(64).round().div(64).clamp(-4, 4)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    # eq. 3: q = 0 in the lower half of the range, 1 from its middle on; x^ = min + (q + 1/2) (max - min) / 2
    expected = low + torch.where(x >= (low + high) / 2, 1.5, 0.5) * (high - low) / 2
    codec = UniformQuant(1, (1, None), clip=0.5)
    assert torch.equal(codec.decode(codec.encode(x), 32), expected)


def test_a_clip_of_1_is_one_of_1_0():
    """A clip may be an int; codecs with clip 1 and 1.0 share cached tensors, which are float32 in both."""
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    whole, number = (UniformQuant(7, group=None, clip=clip) for clip in (1, 1.0))
    for mine, other in zip(whole.fixed(x), number.fixed(x), strict=True):
        assert mine.dtype == other.dtype == torch.float32 and torch.equal(mine, other)
    assert torch.equal(whole.encode(x)["words"], number.encode(x)["words"])


def test_codes_are_numbers_even_where_a_step_is_zero():
    """Codes of a group with scale 0 are in 0 ... 3: NaN would be packed as different integers on different machines."""
    x = torch.full((1, 1, 4, 8), 3.0)
    for zero in (3.0, 2.99, 3.01):
        codes = quantise(x, torch.tensor([0.0, zero]).expand(1, 1, 4, 2), (1, 8), 2)
        assert bool(((codes >= 0) & (codes <= 3)).all())


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zero(group, dtype):
    codec = UniformQuant(3, group)
    x = torch.zeros(2, 2, 16, 16, dtype=dtype)
    decoded = codec.decode(codec.encode(x), 16)
    # With a fixed range of [-1, 1] there is no level at 0: the nearest is half a step away.
    assert bool((decoded.abs() <= (0 if group else (1 + FLOAT32) / 7)).all())
    x[..., 3] = torch.arange(16).to(dtype)  # one live channel among dead ones
    decoded = codec.decode(codec.encode(x), 16)
    assert bool(torch.isfinite(decoded).all())
    if group in [(8, 1), (None, 1)]:
        assert bool((decoded[..., [0, 1, 2, 4, 15]] == 0).all())


@pytest.mark.parametrize("group", [group for group in GROUPS if group], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float16, 65504.0), (torch.bfloat16, 1.5e38), (torch.float32, 1.5e38), (torch.float32, 7e4)],
    ids=["float16", "bfloat16", "float32", "just beyond float16"],
)
def test_the_largest_values_are_finite_and_within_the_bound(dtype, largest, bits, group):
    x = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
    x[..., ::3, ::5] = largest
    x[..., 1::3, 1::5] = -largest
    codec = UniformQuant(bits, group)
    decoded = codec.decode(codec.encode(x), 16)
    assert bool(torch.isfinite(decoded).all())
    assert bool(((decoded.double() - x.double()).abs() <= codec.error_bound(x).double()).all())


def test_parameters_are_wide_only_where_float16_cannot_hold_them():
    x = torch.randn(1, 1, 8, 16)
    large = x.clone()
    large[..., 0] = 1e5
    assert UniformQuant(2).encode(x)["parameters"].dtype == torch.float16
    assert UniformQuant(2).encode(large)["parameters"].dtype == torch.float32
    assert not UniformQuant(2).fp32_params(torch.full((1, 1, 1, 4), 65504.0, dtype=torch.float16))
    assert UniformQuant(1).fp32_params(torch.full((1, 1, 1, 4), 65504.0, dtype=torch.float16))  # a scale of 131008


@pytest.mark.parametrize("group", [(1, None), (8, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_huge_neighbour_does_not_change_a_rows_numbers(bits, group):
    x = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(6)) * 3
    x[1] *= 1e6
    codec = UniformQuant(bits, group)
    together, alone = codec.encode(x), codec.encode(x[:1])
    assert together["parameters"].dtype == torch.float32 and alone["parameters"].dtype == torch.float16
    for name, part in alone.items():
        assert torch.equal(part[0].float(), together[name][0].float()), name


def test_a_layer_that_chose_16_bits_and_meets_larger_values_stays_finite():
    codec = UniformQuant(2, (1, None))
    x = torch.randn(1, 1, 4, 16) * 1e9
    block = codec.encode(x, fp32_params=False)
    assert block["parameters"].dtype == torch.float16
    assert bool(torch.isfinite(codec.decode(block, 16)).all())


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, 2.0, True, "two", "2", None])
def test_bits_must_be_a_whole_number_from_1_to_8(bits):
    with pytest.raises(ValueError, match=f"1 ... 8, got {bits!r}"):
        UniformQuant(bits)


@pytest.mark.parametrize("group", [(0, 1), (1, -4), (1.5, 1), ("32", 1), 32, (32,), "32x1", (1, 2, 3), (True, 1)])
def test_groups_must_be_two_positive_sizes(group):
    with pytest.raises(ValueError, match=r"group.*got"):
        UniformQuant(2, group)


@pytest.mark.parametrize("clip", [0, 0.0, -1.0, 1.01, 2, float("nan"), float("inf"), "0.5", None, True])
def test_the_clip_must_be_a_number_above_0_and_at_most_1(clip):
    with pytest.raises(ValueError, match=r"clip must be .*\(0, 1\], got"):
        UniformQuant(2, (1, None), clip)


@pytest.mark.parametrize(
    ("group", "axis"), [((3, 1), "tokens"), ((1, 5), "channels"), ((32, 1), "tokens"), ((1, 64), "channels")]
)
def test_a_group_that_does_not_divide_is_refused(group, axis):
    with pytest.raises(ValueError, match=rf"{max(group)} {axis} does not divide 16 {axis}"):
        UniformQuant(2, group).encode(torch.zeros(1, 1, 16, 16))


@pytest.mark.parametrize("group", [(None, 1), (None, None)], ids=str)
def test_a_group_over_all_tokens_is_refused_by_pages(group):
    with pytest.raises(ValueError, match="all tokens"):
        UniformQuant(2, group).fields(16, torch.float16)
