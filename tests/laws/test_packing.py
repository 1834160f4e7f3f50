"""Packed words and bytes: round trips at every width, and the layout of kernels/pack/README.md."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from oracle import unpacked

from calib.kernels.pack.heads import first_words, join_heads, spread_heads
from calib.kernels.pack.reference import (
    bytes_per_token,
    pack,
    pack_bytes,
    pattern,
    planes,
    unpack,
    unpack_bytes,
    unpack_columns,
    words_per_token,
)

pytestmark = pytest.mark.arithmetic

WIDTHS = range(1, 9)


def random_codes(shape: tuple[int, ...], bits: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(
    bits=st.integers(1, 8),
    channels=st.integers(1, 140),
    lead=st.lists(st.integers(1, 3), max_size=3),
    seed=st.integers(0, 99),
)
def test_unpacking_gives_the_codes_back(bits, channels, lead, seed):
    codes = random_codes((*lead, channels), bits, seed)
    before = codes.clone()
    words = pack(codes, bits)
    assert words.dtype == torch.int16 and words.shape == (*lead, words_per_token(channels, bits))
    assert torch.equal(unpack(words, bits, channels), codes)
    columns = unpack_columns(words.unsqueeze(-2).expand(*lead, 3, -1).mT, bits, channels)  # the same token three times
    assert torch.equal(columns, codes.short().unsqueeze(-1).expand(*lead, channels, 3))
    assert torch.equal(torch.from_numpy(unpacked(words.numpy(), bits, channels)), codes.long())
    assert torch.equal(codes, before)


@st.composite
def patterns(draw) -> tuple[int, ...]:
    """Draw the widths of a word's fields: 1 ... 8 bits each, 16 together at most."""
    widths = [draw(st.integers(1, 8))]
    while (left := 16 - sum(widths)) and draw(st.integers(0, 7)):
        widths.append(draw(st.integers(1, min(8, left))))
    return tuple(widths)


@settings(derandomize=True, deadline=None, max_examples=examples(100))
@given(widths=patterns(), words=st.integers(1, 9), missing=st.integers(0, 20), seed=st.integers(0, 99))
def test_fields_of_any_widths_give_the_codes_back(widths, words, missing, seed):
    """A round trip, and a comparison of every word's bits with its fields; the last planes may have fewer channels."""
    channels = max((len(widths) - 1) * words + 1, len(widths) * words - missing)
    words = words_per_token(channels, widths)
    levels = torch.tensor([2**width for width in widths]).repeat_interleave(words)[:channels]
    draw = torch.Generator().manual_seed(seed)
    codes = (torch.rand(2, 3, channels, generator=draw) * levels).floor().to(torch.int16)
    codes[0] = (levels - 1).short()  # every bit of every field
    before = codes.clone()
    packed = pack(codes, widths)
    assert packed.shape == (2, 3, words_per_token(channels, widths)) == (2, 3, words) and packed.is_contiguous()
    assert torch.equal(codes, before)
    assert torch.equal(unpack(packed, widths, channels).short(), codes)
    assert torch.equal(unpack_columns(packed.mT, widths, channels), codes.mT)
    for word in range(words):
        number, begin = int(packed[1, 2, word]) & 0xFFFF, 0
        for plane, width in enumerate(widths):
            channel = plane * words + word
            assert number >> begin & 2**width - 1 == (int(codes[1, 2, channel]) if channel < channels else 0)
            begin += width
        assert number >> begin == 0


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple),
    tokens=st.integers(0, 4),
    lead=st.lists(st.integers(1, 2), max_size=2),
)
def test_heads_lie_side_by_side(counts, tokens, lead):
    heads, most, total = len(counts), max(counts), sum(counts)
    size = int(torch.tensor([*lead, heads, tokens, most]).prod())
    words = torch.arange(1, size + 1, dtype=torch.int16).view(*lead, heads, tokens, most)
    row = join_heads(words, counts)
    assert row.shape == (*lead, 1, tokens, total)
    begins = first_words(counts, row.device)
    assert begins.dtype == torch.int32 and begins.tolist() == [sum(counts[:head]) for head in range(heads + 1)]
    spread = spread_heads(row.mT, counts)
    assert spread.shape == (*lead, heads, most, tokens)
    for head, count in enumerate(counts):
        own = words[..., head, :, :count]
        assert torch.equal(row[..., 0, :, begins[head] : begins[head + 1]], own)
        assert torch.equal(spread[..., head, :count, :], own.mT)
        beyond = spread[..., head, count:, :]  # must be words of the row, though of any head
        assert torch.isin(beyond, row).all()


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(
    width=st.integers(1, 16),
    count=st.integers(1, 40),
    lead=st.lists(st.integers(1, 3), max_size=3),
    seed=st.integers(0, 99),
)
def test_bytes_give_the_numbers_back(width, count, lead, seed):
    numbers = torch.randint(0, 2**width, (*lead, count), generator=torch.Generator().manual_seed(seed))
    packed = pack_bytes(numbers, width)
    assert packed.dtype == torch.uint8 and packed.shape == (*lead, bytes_per_token(count, width))
    assert torch.equal(unpack_bytes(packed, width, count), numbers.int())
    columns = packed.unsqueeze(-2).expand(*lead, 3, -1).mT.contiguous().mT  # strides of a tile whose tokens come last
    assert torch.equal(unpack_bytes(columns, width, count), numbers.int().unsqueeze(-2).expand(*lead, 3, count))


def test_the_bytes_written_out_by_hand():
    # 9 bits = 8 + 1: the low bytes of three numbers, then their ninth bits in the low bits of one byte.
    assert pack_bytes(torch.tensor([0x101, 0x0FF, 0x180]), 9).tolist() == [0x01, 0xFF, 0x80, 0b101]
    # 4 bits, 3 numbers: 2 planes of 2 bytes; the second plane holds the third number alone.
    assert pack_bytes(torch.tensor([1, 2, 3]), 4).tolist() == [0x31, 0x02]
    # 13 bits = 8 + 4 + 1, one number of 0b1_1010_00000111.
    assert pack_bytes(torch.tensor([0b1101000000111]), 13).tolist() == [0b00000111, 0b1010, 1]
    # No bit is lost where parts fill their bytes: 8 numbers of 13 bits.
    assert bytes_per_token(8, 13) == 13 and bytes_per_token(4, 13) == 7
    with pytest.raises(ValueError, match=r"1 \.\.\. 16 bits, got 17"):
        pack_bytes(torch.tensor([1]), 17)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_at_every_position(bits):
    for code in range(2**bits):
        for position in (0, 1, 17, 31):
            codes = torch.zeros(32, dtype=torch.uint8)
            codes[position] = code
            assert torch.equal(unpack(pack(codes, bits), bits, 32), codes)


def test_the_layout_written_out_by_hand():
    # 4 bits, 8 channels: 4 planes of W = 2 channels. Word 0 holds channels 0, 2, 4, 6, the first in the lowest bits.
    words = pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4)
    assert words.tolist() == [0x7531, 0x8642 - 0x10000]  # the sixteenth bit is the sign of an int16
    # 3 bits, 7 channels: 5 planes, W = ceil(7 / 5) = 2; plane 3 holds channel 6 alone and plane 4 is unused.
    words = pack(torch.tensor([7, 1, 2, 3, 4, 5, 6]), 3)
    assert words.tolist() == [7 | 2 << 3 | 4 << 6 | 6 << 9, 1 | 3 << 3 | 5 << 6]
    # 1 bit, 16 channels: one word, channel c in bit c.
    assert pack(torch.tensor([1, 0, 1, 1] + [0] * 11 + [1]), 1).tolist() == [0x800D - 0x10000]
    # 8 bits, 3 channels: 2 planes of W = 2; word 1 has only its low byte.
    assert pack(torch.tensor([255, 128, 1]), 8).tolist() == [0x01FF, 128]
    # 6, 4, 3, 2 and 1 bits, two words: word 0 has codes 0, 2, 4, 6, 8, one of each plane.
    words = pack(torch.tensor([63, 1, 0, 15, 5, 2, 3, 0, 1, 0]), (6, 4, 3, 2, 1))
    assert words.tolist() == [(63 | 5 << 10 | 3 << 13 | 1 << 15) - 0x10000, 1 | 15 << 6 | 2 << 10]
    # 8, 7 and 1: the last plane goes all the way from the first bit to the sign.
    assert pack(torch.tensor([255, 127, 1]), (8, 7, 1)).tolist() == [-1]
    assert pack(torch.tensor([2, 3, 1]), (8, 7, 1)).tolist() == [0x8302 - 0x10000]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("channels", [1, 7, 32, 33, 64, 80, 127, 128])
def test_unused_fields_are_zero(bits, channels):
    words = pack(torch.full((channels,), 2**bits - 1), bits).long() & 0xFFFF
    ones = sum(int(word).bit_count() for word in words.tolist())
    assert ones == bits * channels


@pytest.mark.parametrize(
    ("bits", "expected"), [(1, [2, 4, 8]), (2, [4, 8, 16]), (3, [7, 13, 26]), (4, [8, 16, 32]), (8, [16, 32, 64])]
)
def test_words_a_token_as_the_table_says(bits, expected):
    assert [words_per_token(channels, bits) for channels in (32, 64, 128)] == expected


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_widths_that_do_not_exist_are_refused(bits):
    with pytest.raises(ValueError, match=f"1 ... 8, got {bits}"):
        planes(bits)


def test_one_width_is_a_pattern():
    assert [pattern(bits) for bits in WIDTHS] == [(bits,) * (16 // bits) for bits in WIDTHS]
    codes = random_codes((3, 40), 3, 0)
    assert torch.equal(pack(codes, 3), pack(codes, (3, 3, 3, 3, 3)))
    assert planes((7, 5, 4)) == 3 and words_per_token(96, (7, 5, 4)) == 32


def test_where_heads_begin_is_kept_however_many_layers_there_are():
    layers = [(layer, 1) for layer in range(300)]
    kept = [first_words(counts, torch.device("cpu")) for counts in layers]
    assert all(first_words(counts, torch.device("cpu")) is own for counts, own in zip(layers, kept, strict=True))


@pytest.mark.parametrize("widths", [(), (9, 1), (4, 0, 4), (8, 8, 1)])
def test_patterns_that_do_not_exist_are_refused(widths):
    with pytest.raises(ValueError, match=r"1 \.\.\. 8|16 bits together"):
        pattern(widths)
