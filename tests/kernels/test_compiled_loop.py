"""Figures that are read from a disassembler's listing, on listings made by hand."""

import pytest

from calib.kernels.compiled_loop import LoopFigures, longest_loop
from calib.kernels.occupancy import programs_at_once
from calib.kernels.turn_alone import Turn, turn_alone

LISTING = """
.L_x_0:
        /*0000*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   LDG.E.64 R2, desc[UR4][R8.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R10.64], !P1 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   I2FP.F32.S32 R4, R2 ;
        /*0060*/               @!UP0 HMMA.16816.F32 R12, R4, R6, R12 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""


def test_the_longest_loop_is_counted():
    figures = LoopFigures(longest_loop(LISTING), registers=40, spilled=0, shared=512)
    assert figures.instructions == {"LDG": 1, "LDGSTS": 1, "BAR": 1, "I2FP": 1, "HMMA": 1, "BRA": 1}
    assert (figures.loads, figures.barriers, figures.conversions) == (2, 1, 1)
    assert figures.cost(count=32, warps=2) == 12 and figures.matrix_per_128_codes(codes=64, warps=1) == 2
    assert figures.bytes_ahead(warps=2) == 2 * 32 * 16


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "capability", "programs"),
    [
        (168, 10_500, 1, 90, 12),  # 16384 // (168 * 32) = 3 warps of a scheduler
        (169, 10_500, 1, 90, 8),  # taken as 176
        (255, 40_960, 4, 90, 2),
        (32, 0, 1, 80, 32),
        (32, 0, 4, 80, 16),  # 64 warps
        (32, 40_000, 1, 80, 4),  # 164 KiB
        (32, 40_000, 1, 90, 5),  # 228 KiB
    ],
)
def test_programs_that_fit(registers, shared, warps, capability, programs):
    assert programs_at_once(registers, shared, warps, capability) == programs


def test_a_turn_alone():
    """Clocks and stops of one loop iteration: without loads the warp never stops; two loads issued together cost one stop; a load
    that is issued early enough costs nothing."""
    nothing = ["IADD3 R1, R1, 0x1, RZ", "FADD R2, R1, R2"]
    assert turn_alone(nothing) == Turn(2, 0)
    one = ["LDG.E R4, desc[UR4][R8.64]", "LDG.E R5, desc[UR4][R8.64+0x4]", "FADD R2, R5, R4", "FADD R2, R4, R2"]
    assert turn_alone(one, memory=100) == Turn(1 + 100 + 2, 1)
    behind = ["LDG.E.64 R4, desc[UR4][R8.64]", "FADD R2, R5, R2", "LDG.E R6, desc[UR4][R8.64]", "FADD R2, R6, R2"]
    assert turn_alone(behind, memory=100) == Turn(2 * 101, 2)
    hidden = ["LDG.E R4, desc[UR4][R8.64]", *["FADD R2, R2, R2"] * 99, "FADD R2, R4, R2"]
    assert turn_alone(hidden, memory=100) == Turn(101, 0)
    ahead = ["FADD R2, R4, R2", *["FADD R2, R2, R2"] * 50, "LDG.E R4, desc[UR4][R8.64]"]
    assert turn_alone(ahead, memory=100) == Turn(51 + 100, 1), "asked at the end of a turn, waited for in the next"
    assert turn_alone(["LDS R4, [R8]", "FADD R2, R4, R2"], shared=30) == Turn(31, 0), "shared memory is no wait"


def test_a_turn_alone_with_loads_a_turn_ahead():
    first = [
        "DEPBAR.LE SB0, 0x0",
        *["FADD R2, R2, R2"] * 200,
        "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R10.64]",
        "LDGDEPBAR",
    ]
    assert turn_alone(first, memory=100) == Turn(203 + 98, 1)
    second = [first[0].replace("0x0", "0x1"), *first[1:]]
    assert turn_alone(second, memory=100) == Turn(203, 0), "two turns ahead"
