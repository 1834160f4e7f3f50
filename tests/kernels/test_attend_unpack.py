"""Unpacking codes to float16 numbers: every word of 16 bits, by plain Triton operations and by the PTX instructions that a GPU runs
(simulated here). The same for trellis-coded levels, whose words are rearranged first."""

import re

import pytest
import torch
import triton
import triton.language as tl

from calib.kernels.attend.trellis_levels import level_assembly, level_constraints, level_words, words_before
from calib.kernels.attend.unpack import assembly, bias_of, constraints, unit_of, unpacked
from calib.kernels.pack.reference import Widths, pattern, unpack
from calib.kernels.trellis.reference import trellis_levels

pytestmark = pytest.mark.arithmetic

MOST = 2**32 - 1

# Largest number of instructions that unpack two words, for codes as multiples of a power of two, and for codes plus a bias. About
# one instruction for two codes, and a shift for several fields.
INSTRUCTIONS = {
    **dict(zip(map(pattern, range(1, 9)), ((17, 18), (9, 10), (6, 7), (5, 7), (4, 5), *[(3, 3)] * 3), strict=True)),
    (6, 4, 3, 2, 1): (6, 6),
    (7, 5, 4): (4, 4),
    (4, 3, 3, 2, 2, 1, 1): (8, 9),
    (1, 2, 3, 4, 6): (6, 7),
    (8, 7, 1): (4, 4),
    (5, 1): (2, 3),
    (3,): (1, 2),
}
PATTERNS = list(INSTRUCTIONS)
BIASED = pytest.mark.parametrize("biased", [False, True], ids=["multiples", "biased"])


@triton.jit
def unpack_words(WORDS, ODD, OUT, size: tl.constexpr, WIDTHS: tl.constexpr, PLANES: tl.constexpr, BIASED: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    odd = None if ODD is None else tl.load(ODD + at)
    found = unpacked(tl.load(WORDS + at), odd, WIDTHS, BIASED, True)
    for plane in tl.static_range(PLANES):
        tl.store(OUT + plane * 65536 + at, found[plane])


@triton.jit
def make_ready(WORDS, OUT, ODD, T: tl.constexpr, W: tl.constexpr, BEFORE: tl.constexpr, WIDTHS: tl.constexpr):
    numbers = tl.arange(0, W)[None, :]
    at = (tl.program_id(0) * T + tl.arange(0, T))[:, None] * W + numbers
    words = ()
    for back in tl.static_range(BEFORE + 1):
        words += (tl.load(WORDS + at - back, mask=numbers >= back, other=0),)
    found = level_words(words, WIDTHS, True)
    tl.store(OUT + at, found[0])
    tl.store(ODD + at, found[1])


def every_word() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16)


def by_plain_operations(
    widths: Widths, words: torch.Tensor, odd: torch.Tensor | None = None, *, biased: bool
) -> torch.Tensor:
    """Unpack all words with the interpreted kernel: float16 `[planes, 65536]`."""
    planes = len(widths) - (odd is not None)
    out = torch.full((planes, 65536), torch.nan, dtype=torch.float16)
    unpack_words[(4,)](words, odd, out, 16384, widths, planes, biased)
    return out


def by_instructions(text: str, outputs: int, words: list[list[int]]) -> list[list[int]]:
    """Simulate a PTX text. `words` has a list of 32-bit registers for each input operand; returns a list for each output."""
    registers = [f"${number}" for number in range(outputs)]
    lines = [line for line in text.splitlines() if line not in ("{", "}") and not line.startswith(".reg")]
    found: list[list[int]] = [[] for _ in registers]
    for given in zip(*words, strict=True):
        held = {f"${outputs + number}": word for number, word in enumerate(given)}
        for line in lines:
            name, into, *operands = re.split(r",?\s+", line.strip().removesuffix(";"))
            numbers = [held[operand] if operand in held else int(operand, 0) for operand in operands]
            if name == "shl.b32":
                held[into] = numbers[0] << numbers[1] & MOST
            elif name == "shr.b32":
                held[into] = numbers[0] >> numbers[1]
            elif name == "mov.b32":
                held[into] = numbers[0]
            else:
                assert name == "lop3.b32"
                held[into] = three_inputs(*numbers)
        for register, column in zip(registers, found, strict=True):
            column.append(held[register])
    return found


def in_pairs(*words: torch.Tensor) -> list[list[int]]:
    """Registers of two words from int16 `[n]`: word i in the lower half, word n - 1 - i in the upper half."""
    wide = [part.long() & 65535 for part in words]
    return [(part | part.flip(0) << 16).tolist() for part in wide]


def halves(register: list[int]) -> torch.Tensor:
    """Undo `in_pairs`: lower and upper halves of the registers, int16 `[2, n]`, the upper halves in the order of the words."""
    found = torch.tensor(register)
    both = torch.stack([found & 65535, (found >> 16).flip(0)])
    return torch.where(both < 2**15, both, both - 2**16).to(torch.int16)


def three_inputs(a: int, b: int, c: int, table: int) -> int:
    """The instruction `lop3`: bits a, b and c become bit 4a + 2b + c of `table`."""
    result = 0
    for k in range(8):
        if table >> k & 1:
            result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return result & MOST


def assert_multiples(numbers: torch.Tensor, codes: torch.Tensor, unit: float) -> None:
    """Assert that float16 numbers are these codes times `unit`."""
    assert 2**-24 <= unit <= 2**-14
    assert torch.equal(numbers.double() / unit, codes.double())


@pytest.mark.parametrize("widths", PATTERNS, ids=str)
def test_numbers_are_multiples_of_a_power_of_two(widths):
    found = by_plain_operations(widths, every_word(), biased=False)
    codes = unpack(every_word()[:, None], widths, len(widths)).T
    for plane, (numbers, own) in enumerate(zip(found, codes, strict=True)):
        assert_multiples(numbers, own, unit_of(widths, plane, False))


@pytest.mark.parametrize("widths", PATTERNS, ids=str)
def test_numbers_are_codes_plus_a_bias(widths):
    found = by_plain_operations(widths, every_word(), biased=True)
    codes = unpack(every_word()[:, None], widths, len(widths)).T
    for plane, (numbers, own, width) in enumerate(zip(found, codes, widths, strict=True)):
        bias = bias_of(widths, plane)
        # Integers that float16 represents, with a bias that costs float32 sums of such codes few bits.
        assert 2 <= bias <= (64 if width <= 4 else 2 ** (4 + width)) and 2**width - 1 + bias <= 2048
        assert torch.equal(numbers.double() - bias, own.double())
        assert torch.equal(numbers - bias, own.half())  # in float16 as well


@BIASED
@pytest.mark.parametrize("widths", PATTERNS, ids=str)
def test_instructions_give_the_same_bits(widths, biased):
    """A register holds two words, and neither word changes the numbers of the other."""
    words = every_word()[torch.randint(0, 65536, (2000,), generator=torch.Generator().manual_seed(len(widths)))]
    words[:4] = torch.tensor([0, -1, 0, -1])
    found = by_instructions(assembly(widths, biased), len(widths), in_pairs(words))
    plain = by_plain_operations(widths, every_word(), biased=biased).view(torch.int16)
    for column, numbers in zip(found, plain, strict=True):
        assert torch.equal(halves(column), numbers[words.long() + 2**15].expand(2, -1))
    assert constraints(widths).split(",") == ["=&r"] * len(widths) + ["r"]


@pytest.mark.parametrize(("widths", "most"), INSTRUCTIONS.items(), ids=str)
def test_instructions_are_few(widths, most):
    for biased in (False, True):
        assert operations(assembly(widths, biased)) <= most[biased]


def operations(text: str) -> int:
    """Number of arithmetic instructions of a PTX text."""
    return len(re.findall(r"\b(?:lop3|shl|shr)\.b32\b", text))


# ---- trellis-coded levels

# Largest number of instructions for two words: to rearrange them, and to unpack them in both ways (see INSTRUCTIONS).
OF_LEVELS = {
    **dict(
        zip(
            map(pattern, range(1, 9)),
            ((13, 21, 23), (15, 13, 16), (15, 10, 11), (15, 9, 9), (11, 7, 7), *[(12, 6, 6)] * 3),
            strict=True,
        )
    ),
    (6, 4, 3, 2, 1): (26, 10, 11),
    (7, 5, 4): (13, 8, 8),
    (4, 3, 3, 2, 2, 1, 1): (33, 12, 14),
    (8, 7, 1): (13, 8, 8),
    (5, 1): (12, 5, 5),
    (3,): (4, 4, 4),
}


def ready(words: torch.Tensor, widths: Widths) -> tuple[torch.Tensor, torch.Tensor]:
    """Rearrange a head's words, int16 `[tokens, W]`, into words of the even planes' levels and of the odd planes' levels."""
    found = torch.empty_like(words), torch.empty_like(words)
    tokens = 128  # of a program
    make_ready[(len(words) // tokens,)](words, *found, tokens, words.shape[1], words_before((*widths, 0)), (*widths, 0))
    return found


@pytest.mark.parametrize("widths", OF_LEVELS, ids=str)
def test_levels_are_those_of_the_path(widths):
    """65,536 words, sixteen of a token: unpacked numbers are the levels times a power of two, or the levels plus a bias;
    subtracting the bias is exact in float16."""
    draw = torch.Generator().manual_seed(len(widths))
    words = torch.randint(-(2**15), 2**15, (4096, 16), generator=draw).to(torch.int16)
    even, odd = ready(words, widths)
    plain, found = (by_plain_operations((*widths, 0), even, odd, biased=biased) for biased in (False, True))
    wanted = trellis_levels(words.mT[None], widths, (16,))[0].unflatten(0, (len(widths), 16)).mT.flatten(1)
    for plane, (numbers, own, width) in enumerate(zip(found, wanted, widths, strict=True)):
        assert_multiples(plain[plane], own, unit_of((*widths, 0), plane, False))
        bias = bias_of((*widths, 0), plane)
        assert 1 <= bias <= (64 if width < 4 else 2 ** (5 + width)) and 2 ** (width + 1) - 1 + bias <= 2048
        assert torch.equal(numbers.double() - bias, own.double())
        assert torch.equal(numbers - bias, own.half())


@BIASED
@pytest.mark.parametrize("widths", OF_LEVELS, ids=str)
def test_instructions_for_levels_give_the_same_bits(widths, biased):
    draw, fields = torch.Generator().manual_seed(9), (*widths, 0)
    words = torch.randint(-(2**15), 2**15, (128, 16), generator=draw).to(torch.int16)
    wanted = ready(words, widths)
    moved = torch.nn.functional.pad(words, (words_before(fields), 0))
    before = [moved[:, words_before(fields) - back :][:, :16].flatten() for back in range(words_before(fields) + 1)]
    found = by_instructions(level_assembly(fields), 2, in_pairs(*before))
    for column, own in zip(found, wanted, strict=True):
        assert torch.equal(halves(column), own.flatten().expand(2, -1))
    assert level_constraints(fields).split(",") == ["=&r"] * 2 + ["r"] * len(before)
    both = in_pairs(*(own.flatten() for own in wanted))
    planes = by_instructions(assembly(fields, biased), len(widths), both)
    whole = [own.flatten().repeat(32) for own in wanted]
    plain = by_plain_operations(fields, *whole, biased=biased).view(torch.int16)[:, : words.numel()]
    for column, numbers in zip(planes, plain, strict=True):
        assert torch.equal(halves(column), numbers.expand(2, -1))
    assert constraints(fields).split(",") == ["=&r"] * len(widths) + ["r", "r"]


@pytest.mark.parametrize(("widths", "most"), OF_LEVELS.items(), ids=str)
def test_instructions_for_levels_are_few(widths, most):
    fields = (*widths, 0)
    for text, own in zip(
        (level_assembly(fields), *(assembly(fields, biased) for biased in (False, True))), most, strict=True
    ):
        assert operations(text) <= own
