"""Compiles every Triton kernel for the supported GPUs and checks the limits of its inner loop, in processes without
TRITON_INTERPRET."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from calib.kernels.ahead_of_time import CAPABILITIES, OPERATIONS, declared
from calib.kernels.attend.options import SHAPES, TWO_BUFFERS, WIDE

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def summed(NUMBERS, OUT, count, CONVERTED: tl.constexpr):
    lanes = tl.arange(0, 32)
    total = tl.zeros([32], tl.float32)
    for start in range(0, count):
        if CONVERTED:
            total += tl.load(NUMBERS + start * 32 + lanes).to(tl.float32)
        else:
            total += tl.load(NUMBERS + start * 32 + lanes).to(tl.float32, bitcast=True)
    tl.store(OUT + lanes, total)
"""


def compiling(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, without TRITON_INTERPRET, and with `folder` on its module path."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if folder:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


# The capability that is always compiled for. The others, which take twice as long together, are marked slow.
OFTEN = 90


@pytest.mark.full
@pytest.mark.parametrize(
    "capability", [own if own == OFTEN else pytest.param(own, marks=pytest.mark.slow) for own in CAPABILITIES]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_compile_within_their_limits(operation, capability, record_property):
    done = compiling("-m", "calib.kernels.ahead_of_time", operation, "--capability", str(capability))
    lines = done.stdout.splitlines()
    for line in lines:
        record_property("kernels", line)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert len(lines) == len(declared(operation))
    assert all(f" sm_{capability}  " in line and line.startswith(operation) for line in lines)


def test_decode_attention_is_held_to_limits():
    """The loop of every specialisation of attention is checked. The limits of 4 and 2 bits, in instructions per code, are at most
    the design's."""
    limits = {name: (one.codes, one.most) for name, one in declared("attend").items() if not name.startswith("merge")}
    assert all(codes > 0 for codes, _ in limits.values())
    assert limits["4 bits, calibrated keys"][1] <= 2.6 and limits["2 bits, calibrated keys"][1] <= 1.8


def test_every_shape_of_a_program_is_compiled():
    """The declared specialisations cover the program shapes of `SHAPES` (block of query rows, warps, more than 128 channels or
    not); light, wide streams only with the smallest block. The allowed spill is at most 176 bytes per lane."""
    attended = {name: one for name, one in declared("attend").items() if not name.startswith("merge")}
    found = {(one.constants["M"], one.warps, one.constants["DK"] > WIDE) for one in attended.values()}
    wanted = {
        (block, warps, wide)
        for block, shapes in SHAPES.items()
        for (heavy, wide), (_, warps) in shapes.items()
        if heavy or not wide or block == 8
    }
    assert wanted <= found
    assert max(one.spilled for one in attended.values()) <= 176


def test_codes_lie_in_two_buffers_where_registers_are_left():
    """On Hopper and later, the specialisations of `zipcache`'s prompts and of `kivi` have two buffers, as measured there. Those of
    blocks of 60, rank 4 or keys per token have one, and so has every specialisation before Hopper, where nothing was measured."""
    found = declared("attend")
    two = {name for name, one in found.items() if one.stages == TWO_BUFFERS}
    measured = {
        f"{bits} bits, {kind}" for bits in (2, 4) for kind in ("ranges of channels", "per channel of 128, ahead")
    }
    assert two >= measured
    full = {
        "2 bits, groups of 32, rank 4",
        "4 bits, blocks of 60",
        "4 bits, keys per token",
    }
    assert found.keys() >= full and not two & full
    assert not any("rows" in name or "exact" in name or "256" in name for name in two)
    assert all(found[name].stages_before_hopper in (2, 3) for name in two)


@pytest.mark.full
def test_programs_fit_99_kib():
    """99 KiB is the shared memory of a program on capability 8.6, 8.9 and 12.0. Compiled for 8.6: exact tokens of 256 channels with
    16 query rows, and keys that are rebuilt from components and rotated to positions per token."""
    script = """
from dataclasses import replace
import torch
from calib.kernels.ahead_of_time import compiled
from calib.kernels.attend.options import stages_of
from calib.kernels.attend.signatures import exact_stream, rope_tables_of, specialisation, stream_of

def made(keys, tables, block, **given):
    one = specialisation(keys, keys, rope_tables=tables, block=block)
    types = {**dict.fromkeys(one.kernel.arg_names, "i32"), **one.types, "POSITIONS": "*i64", "QUERY": "*fp32"}
    constants = {**one.constants, **given}
    if "HAS_POSITIONS" in given:
        del constants["POSITIONS"]
    return replace(one, types=types, constants=constants, stages=stages_of(keys, keys, tables, block, (8, 6)))

full = exact_stream(256)
float32 = replace(full, pages=torch.empty(full.pages.shape, device="meta"))
turned, wide = (stream_of((6, 4, 3, 2, 1), channels=components) for components in (80, 160))
for name, one in {
    "exact": made(full, None, 16),
    "float32": made(float32, None, 16, PRECISE=True),
    "turned, precise, positions": made(turned, rope_tables_of(80, 128), 16, PRECISE=True, HAS_POSITIONS=True),
    "turned, 256 channels, positions": made(wide, rope_tables_of(160, 256), 16, HAS_POSITIONS=True),
}.items():
    shared = compiled(replace(one, stages_before_hopper=None), 86).metadata.shared
    assert shared <= 99 << 10, (name, shared)
"""
    done = compiling("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_parts_are_merged_many_at_a_time():
    """A row of 32,768 tokens has about a hundred parts of the softmax. An iteration of the merge loop reads 64 of them: at least 16
    loads per lane, and no register is spilled."""
    script = """
from calib.kernels.ahead_of_time import CAPABILITIES, compiled, declared, loop_figures

for capability in CAPABILITIES:
    figures = loop_figures(compiled(declared("attend")["merge"], capability))
    assert figures.instructions["LDG"] >= 16 and not figures.spilled, figures
"""
    done = compiling("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_parts_are_read_behind_the_wait():
    """Programmatic dependent launch, read from the compiled instructions. On Hopper and later the kernel of exact tokens multiplies
    before it waits (ACQBULK) for the packed tokens' parts, and stores nothing before; if it returns scores it waits first. The
    kernel of packed tokens lets the next launch begin (PREEXIT) before its first load. Before Hopper neither instruction occurs."""
    script = """
from calib.kernels.ahead_of_time import CAPABILITIES, HOPPER, compiled, declared
from calib.kernels.compiled_loop import code_and_loops, disassembled, name_of

found = declared("attend")
for capability in CAPABILITIES:
    for name in ("exact tokens and runs joined", "exact tokens and runs, told", "4 bits, ranges of channels"):
        code, _ = code_and_loops(disassembled(compiled(found[name], capability))[0])
        waits = [at for at, line in enumerate(code) if name_of(line) == "ACQBULK"]
        says = [at for at, line in enumerate(code) if name_of(line) == "PREEXIT"]
        loads, stores = ([at for at, line in enumerate(code) if name_of(line) == kind] for kind in ("LDG", "STG"))
        if capability < HOPPER:
            assert not waits and not says, (name, capability)
        elif name.startswith("4 bits"):
            assert not waits and len(says) == 1 and says[0] < loads[0], (name, capability)
        elif name.endswith("told"):
            assert len(waits) == 1 and waits[0] < loads[0] and not says, (name, capability)
        else:
            (wait,) = waits
            products = [at for at, line in enumerate(code) if name_of(line) == "HMMA"]
            assert products[0] < wait < loads[-1] and wait < stores[0] and not says, (name, capability)
            assert capability > HOPPER or products[-1] < wait, (name, capability)
"""
    done = compiling("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]


def test_fields_of_different_widths_are_held_to_those_of_one():
    """The cost of words with fields of mixed widths is compared with fields of one width: per word with a token of as many bits,
    and per code with words of as many codes."""
    found = declared("attend")
    for name, one in found.items():
        widths = one.constants.get("KEY_WIDTHS", ())
        trellis = 0 in widths  # whose levels cost more
        if (
            len(set(widths)) > 1 and not trellis and not one.constants["HALF"]
        ):  # not for rotated keys, whose cost is mainly that of rebuilding them from components
            beside = {kind: found[other] for kind, other in one.beside.items()}
            words = {kind: other.words * 2 for kind, other in beside.items()} | {"own": one.words * 2}
            assert beside.keys() == {"word", "code"}, name
            assert len(set(words.values())) == 1, words  # bytes of an iteration
            assert beside["code"].codes == one.codes == one.words * len(widths)
            assert beside["word"].codes > one.codes
    assert sum(bool(one.beside) for one in found.values()) == 2


@pytest.mark.full
def test_what_misses_a_limit_is_told(tmp_path):
    """`report` accepts a small kernel with limits that it meets, and rejects it with a tighter limit of each kind, or if it
    converts integers to floats in its loop."""
    (tmp_path / "summing.py").write_text(KERNEL)
    script = """
from dataclasses import replace
from math import inf
from calib.kernels import ahead_of_time
from calib.kernels.ahead_of_time import Specialisation, compiled, loop_figures, report
from summing import summed

types = {"NUMBERS": "*i32", "OUT": "*fp32", "count": "i32"}
plain, converted = (Specialisation(summed, types, {"CONVERTED": flag}, 1, 3, 32) for flag in (False, True))
cost = loop_figures(compiled(plain, 90)).cost(32, 1)
assert 1 < cost < 100, cost
for capability in ahead_of_time.CAPABILITIES:
    assert loop_figures(compiled(plain, capability)).conversions == 0
    figures = loop_figures(compiled(converted, capability))
    assert figures.conversions >= 1, figures
    assert figures.registers > 0 and figures.spilled == figures.shared == 0
cases = {
    "within": (replace(plain, most=100.0), True),
    "beyond": (replace(plain, most=1.0), False),
    "converting": (converted, False),
    "held to nothing": (replace(converted, codes=0), True),
    "words": (replace(plain, words=16), True),
    "no barriers": (replace(plain, barriers=0), True),
    "no wait": (replace(plain, waits=0), False),
    "as many programs as fit": (replace(plain, programs=32), True),
    "more programs than fit": (replace(plain, programs=33), False),
    "a word as dear": (replace(plain, words=16, beside={"word": "words", "code": "within"}), True),
    "a word too dear": (replace(plain, words=15, beside={"word": "words"}), False),
    "a code too dear": (replace(plain, codes=31, words=16, beside={"word": "words", "code": "within"}), False),
}
ahead_of_time.declared = lambda operation: {name: one for name, (one, _) in cases.items()}
told = list(report(["summing"]))
assert [holds for _, holds in told] == [good for _, good in cases.values() for _ in ahead_of_time.CAPABILITIES], told
lines = dict(zip(cases, (line for line, _ in told[:: len(ahead_of_time.CAPABILITIES)]), strict=True))
assert "at most 1.0" in lines["beyond"] and "conversions; a turn: " in lines["converting"], told
assert "instructions a code" not in lines["held to nothing"] and "programs at once" in lines["held to nothing"], told
assert "instructions a word" in lines["words"] and "instructions a word" not in lines["within"], told
"""
    done = compiling("-c", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_a_missed_limit_is_an_exit_status(tmp_path):
    script = """
import runpy, sys
from dataclasses import replace
from calib.kernels.host_gather import triton as kernels

name, one = next(iter(kernels.SPECIALISATIONS.items()))
kernels.SPECIALISATIONS = {name: replace(one, warps=1, codes=1, most=0.0)}
sys.argv[1:] = ["host_gather"]
runpy.run_module("calib.kernels.ahead_of_time", run_name="__main__")
"""
    done = compiling("-c", script)
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stdout.count("MISSED") == len(CAPABILITIES)
