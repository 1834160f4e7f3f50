"""Products of queries and weights with codes in compiled C: against float64, and bit for bit the same for a batch row alone. Inputs
that C does not support, or a missing compiler, leave them to plain torch."""

import logging
import os
import select
import shutil
import stat
import subprocess
import sys

import pytest
import torch

from calib.kernels import compiled
from calib.kernels.attend import cpu, pages_cpu, products, reference
from calib.kernels.pack.heads import spread_heads
from calib.kernels.pack.reference import planes, unpack_columns, words_per_token

pytestmark = pytest.mark.arithmetic

there = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))) and "CC" not in os.environ, reason="no C compiler"
)

CASES = [  # bits, channels, query rows, tokens
    (2, 64, 3, 1792), (4, 128, 4, 77), (1, 32, 1, 16), (3, 60, 8, 40), (5, 24, 2, 1), (8, 16, 7, 300), (7, 10, 5, 33),
    (6, 512, 6, 15),
]  # fmt: skip
RAGGED = [((6, 4, 3, 2, 1), (10, 12, 8)), ((5, 4, 3, 2, 1, 1), (1, 2, 1)), ((7, 5, 4), (3, 0, 5)), ((8, 8), (4, 4, 4))]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.delenv("CALIB_KERNELS", raising=False)


def tile(bits, channels, tokens, batch=2, heads=3, seed=0):
    """Words in the memory layout of a pool: a slice of longer rows."""
    shape = (batch, heads, words_per_token(channels, bits), tokens + 9)
    words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    return words[..., 4 : 4 + tokens]


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found, wanted, sizes):
    """Whether the error is at most float32's rounding of a sum whose terms' absolute values add up to `sizes`."""
    return found.dtype == torch.float32 and bool(((found.double() - wanted).abs() <= 1e-5 * sizes + 1e-30).all())


@there
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("bits", "channels", "rows", "tokens"), CASES)
def test_products_are_those_of_float64(bits, channels, rows, tokens, threads):
    words, query = tile(bits, channels, tokens), drawn(2, 3, rows, channels)
    weights = drawn(2, 3, rows, tokens, seed=2)
    assert cpu.serves(query, words) and cpu.serves(weights, words, channels)
    codes, before = unpack_columns(words, bits, channels).double(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        scores, mixed = products.code_scores(query, words, bits), products.code_mix(weights, words, bits, channels)
    finally:
        torch.set_num_threads(before)
    assert near(scores, query.double() @ codes, query.abs().double() @ codes)
    assert near(mixed, weights.double() @ codes.mT, weights.abs().double() @ codes.mT)


@there
@pytest.mark.parametrize(
    ("columns", "block"), [(64, 32), (64, 40), (64, 128), (16, 32), (2, 1), (1, 1), (64, 1280), (4, 1), (1, 1280)]
)
@pytest.mark.parametrize("rows", [3, 8])
def test_groups_of_channels_and_tokens_have_scales_of_their_own(columns, block, rows):
    bits, channels, tokens = 2, 64, 1280
    words, query, weights = tile(bits, channels, tokens), drawn(2, 3, rows, channels), drawn(2, 3, rows, tokens, seed=2)
    parameters = drawn(2, 3, 2 * columns, tokens // block, seed=3).half()
    scale, zero = (
        part.double().repeat_interleave(channels // columns, -2).repeat_interleave(block, -1)
        for part in parameters.chunk(2, -2)
    )
    x = unpack_columns(words, bits, channels).double() * scale + zero
    sizes = 3 * scale.abs() + zero.abs()
    scores = products.uniform_scores(query, words, parameters, bits)
    assert near(scores, query.double() @ x, query.abs().double() @ sizes)
    mixed = products.uniform_mix(weights, words, parameters, bits, channels)
    assert near(mixed, weights.double() @ x.mT, weights.abs().double() @ sizes.mT)


@there
@pytest.mark.parametrize("segment", [16, 20, 100])
def test_segments_have_channel_scales_of_their_own(segment):
    words, query, weights = tile(4, 24, 400), drawn(2, 3, 3, 24), drawn(2, 3, 3, 400, seed=2)
    scales = drawn(2, 3, 24, 400 // segment, seed=3).abs()
    x = unpack_columns(words, 4, 24).double() * scales.double().repeat_interleave(segment, -1)
    assert near(products.scaled_scores(query, words, scales, 4), query.double() @ x, query.abs().double() @ x)
    mixed = products.scaled_mix(weights, words, scales, 4)
    assert near(mixed, weights.double() @ x.mT, weights.abs().double() @ x.mT)


@there
@pytest.mark.parametrize("tokens", [1, 16, 47, 512])
@pytest.mark.parametrize(("widths", "counts"), RAGGED)
def test_heads_side_by_side_and_keys_that_are_turned(widths, counts, tokens):
    """The words of all heads in one row: scores and mixtures of codes, and scores of keys that are rebuilt from codes and rotated.
    Components that a head has no word for get a query of 0, and their mixtures, which are undefined, are not compared."""
    components, draw = planes(widths) * max(counts), torch.Generator().manual_seed(5)
    words = torch.randint(-(2**15), 2**15, (2, 1, sum(counts), tokens), dtype=torch.int16, generator=draw)
    codes = unpack_columns(spread_heads(words, counts), widths, components).double()
    own = torch.arange(components) % max(counts) < torch.tensor(counts)[:, None]  # [heads, components]
    query, weights = drawn(2, 3, 3, components) * own[:, None], drawn(2, 3, 3, tokens, seed=2)
    scores = products.code_scores(query, words, widths, counts)
    assert near(scores, query.double() @ codes, query.abs().double() @ codes)
    mixed = products.code_mix(weights, words, widths, components, counts)
    wanted, sizes = weights.double() @ codes.mT, weights.abs().double() @ codes.mT
    assert near(mixed * own[:, None], wanted * own[:, None], sizes) and bool(mixed.isfinite().all())

    sizes = drawn(2, 3, 1, tokens, seed=6).abs()
    for size, shared in ((None, True), (sizes, True), (sizes, False)):
        more = 1 if size is None else 2
        matrix = torch.cat([drawn(3, 24, components, seed=7) * own[:, None], drawn(3, 24, more, seed=8)], -1)
        angles = drawn(*(() if shared else (2, 3)), 10, tokens, seed=9)
        asked = drawn(2, 3, 4, 24, seed=10)
        given = (asked, words, widths, counts, matrix, angles.cos(), angles.sin(), size)
        found = products.rotated_code_scores(*given)
        as_float64 = (
            part.double() if part is not None and part.is_floating_point() else part for part in (matrix, size)
        )
        wide, wide_size = as_float64
        one = torch.ones(2, 3, 1, tokens).double()
        numbers = torch.cat([codes, one] if size is None else [codes * wide_size, wide_size, one], -2)
        keys = wide @ numbers
        bound = asked.abs().double() @ torch.ones(24, 24).double() @ (wide.abs() @ numbers)
        wanted = reference.rotated_scores(asked.double(), keys, angles.double().cos(), angles.double().sin())
        assert near(found, wanted, bound)


@there
def test_a_row_is_the_same_alone_and_in_a_batch():
    words, query, weights = tile(2, 64, 777, batch=5), drawn(5, 3, 3, 64), drawn(5, 3, 3, 777)
    scores, mixed = products.code_scores(query, words, 2), products.code_mix(weights, words, 2, 64)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(products.code_scores(query[one], words[one], 2), scores[one])
        assert torch.equal(products.code_mix(weights[one], words[one], 2, 64), mixed[one])


@pytest.mark.full
def test_what_c_does_not_serve_goes_by_plain_torch(monkeypatch):
    words, query = tile(2, 64, 32), drawn(2, 3, 3, 64)
    monkeypatch.setattr(cpu, "code_scores", lambda *_, **__: pytest.fail("served"))
    wanted = reference.code_scores(query, words, 2)
    asking = query.clone().requires_grad_()
    products.code_scores(asking, words, 2).sum().backward()
    torch.testing.assert_close(
        asking.grad, unpack_columns(words, 2, 64).float().sum(-1, keepdim=True).mT.expand(2, 3, 3, 64)
    )
    products.code_scores(drawn(2, 3, 9, 64), words, 2)  # more rows
    assert torch.equal(products.code_scores(query, words.mT.contiguous().mT, 2), wanted)  # tokens are not contiguous
    monkeypatch.setenv("CALIB_KERNELS", "reference")
    assert torch.equal(products.code_scores(query, words, 2), wanted)
    monkeypatch.delenv("CALIB_KERNELS")
    compile_ = torch.compile(lambda q: products.code_scores(q, words, 2), backend="eager")
    assert torch.equal(compile_(query), wanted)


@there
def test_blocks_that_do_not_make_up_the_tokens_are_refused():
    words, scales = tile(2, 64, 100), drawn(2, 3, 3, 64)
    with pytest.raises(ValueError, match="got 3 scales for 100 tokens in blocks of 33"):
        cpu.code_scores(drawn(2, 3, 3, 64), words, 2, block=33, scales=scales)
    with pytest.raises(ValueError, match="got 3 scales for 100 tokens in blocks of 32"):
        cpu.code_mix(drawn(2, 3, 1, 3, 100), words, 2, 64, block=32, scales=scales)


def forget():
    """Clear this process's caches of loaded libraries and of the compiler."""
    compiled.library.cache_clear()
    compiled.library_of_rows.cache_clear()
    compiled._compiler.cache_clear()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The folder of compiled libraries, which does not exist yet; nothing is loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "calib" / "compiled"
    forget()


@there
@pytest.mark.full
def test_a_library_is_compiled_once_and_found_again(fresh, monkeypatch):
    assert compiled.library_of_rows(cpu.SOURCE, 3) is not None
    (kept,) = fresh.iterdir()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    forget()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("compiled again"))
    assert compiled.library_of_rows(cpu.SOURCE, 3) is not None and list(fresh.iterdir()) == [kept]


@there
@pytest.mark.full
def test_what_a_killed_process_left_goes_with_the_next_library(fresh):
    assert compiled.library_of_rows(cpu.SOURCE, 3) is not None
    left, live = fresh / "tmpabcdefgh.so", fresh / "tmphgfedcba.so"
    for path in (left, live):
        path.write_bytes(b"")
    os.utime(left, (0, 0))
    assert compiled.library_of_rows(cpu.SOURCE, 2) is not None
    assert not left.exists() and live.exists() and len(list(fresh.iterdir())) == 3


@there
@pytest.mark.full
def test_a_library_is_of_one_number_of_query_rows(fresh):
    """A library for all numbers of query rows took minutes to compile. Its size would show it: this one is below 200 kB."""
    assert compiled.library_of_rows(pages_cpu.SOURCE, 4) is not None
    (kept,) = fresh.iterdir()
    assert kept.stat().st_size < 200_000


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes")
def test_a_compiler_that_is_late_ends_with_its_children(fresh, monkeypatch, tmp_path, caplog):
    """After its timeout the compiler's children are killed as well: they would slow down the next compiler."""
    monkeypatch.setenv("CC", str(tmp_path / "late"))
    monkeypatch.setattr(compiled, "SECONDS", 1)
    script, pipe = tmp_path / "late", tmp_path / "pipe"
    os.mkfifo(pipe)
    script.write_text(f"#!/bin/sh\nsleep 60 > {pipe} &\nwait\n")
    script.chmod(0o755)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with caplog.at_level(logging.INFO, "calib"):
        assert compiled.library_of_rows(cpu.SOURCE, 3) is None and not list(fresh.iterdir())
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "WARNING"] and not [text for _, text in told if "\n" in text]
    assert (
        "codes.c is compiled for this processor" in told[0][1] and f"{script}' timed out after 1 seconds" in told[1][1]
    )
    assert select.select([reader], [], [], 5)[0] == [reader] and os.read(reader, 1) == b""  # no writer is left
    os.close(reader)


@pytest.mark.parametrize("compiler", [None, "fails", "writes nothing that loads"])
def test_without_a_working_compiler_there_is_no_library(fresh, monkeypatch, tmp_path, caplog, compiler):
    """A message says so, and products are those of plain torch."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        script = tmp_path / "cc"
        script.write_text(f"#!{sys.executable}\nraise SystemExit({int(compiler == 'fails')})\n")
        script.chmod(0o755)
    with caplog.at_level(logging.INFO, "calib"):
        assert compiled.library_of_rows(cpu.SOURCE, 3) is None
    said = caplog.records[-1]
    assert ("no C compiler is found" if compiler is None else "codes.c is not compiled (") in said.getMessage()
    assert said.levelname == ("INFO" if compiler is None else "WARNING") and "\n" not in said.getMessage()
    assert not [path for path in fresh.glob("*") if compiler == "fails"]
    words, query = tile(2, 64, 32), drawn(2, 3, 3, 64)
    assert torch.equal(products.code_scores(query, words, 2), reference.code_scores(query, words, 2))


@there
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
def test_a_folder_that_others_may_write_is_not_trusted(fresh):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert compiled.library_of_rows(cpu.SOURCE, 3) is None and not list(fresh.iterdir())
