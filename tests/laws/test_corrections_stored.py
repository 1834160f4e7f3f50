"""Laws of the fields that corrections add to every codec: bytes, bits, pages and records, and attention over them."""

import pytest
import torch
from corrected_codecs import (
    CHANNELS,
    HEADS,
    all_low_ranks,
    all_outliers,
    as_stored,
    attended,
    backbone_alone,
    backbones,
    by_entry,
    check_attention,
    encoded,
    law,
    problems,
    randn,
    segment,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from tolerances import FLOAT32_ATTENTION

from calib.runtime.paging.pool import PagePool
from calib.runtime.paging.token_runs import TokenRuns
from calib.runtime.stages.codec import Corrected, UniformQuant
from calib.runtime.stages.codec.corrected import OUTLIERS, OVERFLOWED
from calib.runtime.stages.contract import Segment
from calib.runtime.stages.correction import Outliers

pytestmark = pytest.mark.arithmetic


@law
@given(problems())
def test_a_block_weighs_what_its_fields_say(problem):
    codec, x, _ = problem
    fp32_params = codec.fp32_params(x)
    block, fields = codec.encode(x), codec.fields(x.shape[-1], x.dtype, fp32_params, segment(x))
    assert set(fields) | {OVERFLOWED} == set(block) | {OVERFLOWED}
    for name, part in as_stored(codec, block, x, fp32_params).items():
        field, heads = fields[name], 1 if fields[name].shared else HEADS
        rows = x.shape[2] // field.tokens_per_row if field.tokens_per_row else 1
        assert part.shape == (len(x), heads, rows, field.width), name
        assert part.nbytes == len(x) * rows * field.row_bytes(HEADS)
        assert bool(part.isfinite().all())
        kind = {"outliers": "outliers", "low_rank": "low_rank"}.get(name.split(".")[0])
        assert kind is None or field.kind == kind


@pytest.mark.full
@law
@given(problems())
def test_a_row_alone_gives_the_same_bits_and_the_input_is_not_changed(problem):
    codec, x, _ = problem
    before, fp32_params = x.clone(), codec.fp32_params(x)
    together = encoded(codec, x)
    copies = {name: part.clone() for name, part in together.items()}
    for row in range(len(x)):
        alone = encoded(codec, x[row : row + 1], fp32_params)
        assert alone.keys() == together.keys()
        for name, part in together.items():
            assert torch.equal(alone[name][0], part[row]), name
        narrow = encoded(
            codec, x[row : row + 1]
        )  # numbers within float16's range are rounded to float16, also beside rows that need float32
        assert all(torch.equal(narrow[name][0].float(), part[row].float()) for name, part in together.items())
    decoded = codec.decode(together, x.shape[-1])
    query, weights = torch.ones(len(x), HEADS, 2, CHANNELS), torch.ones(len(x), HEADS, 2, x.shape[2])
    tile = {name: part.mT for name, part in together.items()}
    attended(codec, query, weights, tile, x.shape[2])
    assert torch.equal(x, before) and bool((query == 1).all() and (weights == 1).all())
    assert all(torch.equal(part, copies[name]) for name, part in together.items())
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)  # the strides of a model's keys and values
    assert all(torch.equal(part, copies[name]) for name, part in encoded(codec, strided).items())
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape and bool(decoded.isfinite().all())


@law
@given(problems())
def test_attention_meets_the_parts_as_it_would_the_tokens(problem):
    codec, x, _ = problem
    block = as_stored(codec, encoded(codec, x), x, codec.fp32_params(x))
    check_attention(codec, block, {name: part.mT for name, part in block.items()}, x.shape)


@pytest.mark.parametrize("codec", [codec for codec in backbones(40) if getattr(codec, "bits", 3) > 1], ids=repr)
def test_every_codec_with_every_correction(codec):
    """With every kind of outliers and low rank around the codec: fields as declared, attention equal to float64 attention over
    decoded tokens, and outliers exact to 2^-10 of the largest value."""
    x = tokens("real", 2, 40, 5)
    for outliers in all_outliers(0.1):
        for low_rank in all_low_ranks(3):
            corrected = Corrected(codec, outliers, low_rank)
            block = as_stored(corrected, encoded(corrected, x), x, False)
            check_attention(corrected, block, {name: part.mT for name, part in block.items()}, x.shape)
            error = (corrected.decode(block, CHANNELS) - x).abs()
            mask = backbone_alone(corrected, x)[1]
            assert bool(mask.any()) is (outliers is not None)
            assert not mask.any() or error[mask].max() < 2.0**-10 * x.abs().max()


def pools(
    codec: Corrected, x: torch.Tensor, longest: int, page_tokens: int, fp32_params: bool
) -> tuple[PagePool, PagePool]:
    """Empty pages and records for segments of up to `longest` tokens; records have the fields that a segment shares."""
    records, pages = (PagePool({}, HEADS, x.device, size) for size in (1, page_tokens))
    fit(codec, pages, records, x, longest, fp32_params)
    return pages, records


def fit(codec: Corrected, pages: PagePool, records: PagePool, x: torch.Tensor, longest: int, fp32_params: bool) -> None:
    fields = codec.fields(x.shape[-1], x.dtype, fp32_params, Segment(HEADS, longest))
    shared = {name: field for name, field in fields.items() if field.tokens_per_row is None}
    records.fit(shared)
    pages.fit({name: field for name, field in fields.items() if name not in shared})


def same_positions(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a stored part equals the encoded one, followed by zeros in a wider field; int16 indices are read as unsigned."""
    if not found.dtype.is_floating_point and expected.dtype in (torch.int32, torch.int64):
        found = found.to(expected.dtype) & 0xFFFF if found.dtype == torch.int16 else found.to(expected.dtype)
    width = expected.shape[-1]
    return torch.equal(found[..., :width], expected.to(found.dtype)) and not bool(found[..., width:].any())


@pytest.mark.full
@law
@given(problems(), st.integers(0, 3))
def test_a_rows_segment_comes_back_from_pages_and_its_record_bit_for_bit(problem, longer):
    """Segments are read back from fields as long as their own (longer = 0), made for a longer segment (1), and widened for one
    after they were written (2, 3)."""
    codec, x, _ = problem
    count, fp32_params = x.shape[2], codec.fp32_params(x)
    page, longest = 8, count * (1 + 9 * longer)
    pages, records = pools(codec, x, longest if longer < 2 else count, page, fp32_params)
    needed = -(-count // page)
    pages.grow(needed * len(x))
    records.grow(len(x))
    block = encoded(codec, x)
    rows = range(len(x))
    pages.write_runs(TokenRuns([list(range(row * needed, (row + 1) * needed)) for row in rows], [0] * len(x)), block)
    records.write_runs(TokenRuns([[row] for row in rows], [0] * len(x)), block)
    if longer >= 2:
        fit(codec, pages, records, x, longest, fp32_params)
    table = torch.arange(needed * len(x), dtype=torch.int32).view(len(x), needed)
    tile = {**pages.read(table), **records.read(torch.arange(len(x), dtype=torch.int32)[:, None])}
    for name, part in tile.items():
        rows = block[name].shape[2]
        stored = part.mT[:, :, :rows]
        assert same_positions(stored, block[name]), name
        tile[name] = stored.mT
    check_attention(codec, {name: part.mT for name, part in tile.items()}, tile, x.shape)


@pytest.mark.full
@law
@given(problems(plain=True, of_rows=False))
def test_segments_of_a_page_each_are_met_together(problem):
    codec, x, _ = problem
    fp32_params, count = codec.fp32_params(x), x.shape[2]
    pages = PagePool(codec.fields(CHANNELS, x.dtype, fp32_params, segment(x)), HEADS, x.device, count)
    pages.grow(2 * len(x))
    blocks = [encoded(codec, part, fp32_params) for part in (x, x.flip(3) * 0.5)]
    for number, block in enumerate(blocks):
        pages.write_runs(TokenRuns([[2 * row, 2 * row + 1] for row in range(len(x))], [number * count] * len(x)), block)
    tile = pages.read(torch.arange(2 * len(x), dtype=torch.int32).view(len(x), 2))
    block = {name: part.mT for name, part in tile.items()}
    for name, part in block.items():
        assert same_positions(part, torch.cat([other[name] for other in blocks], 2)), name
    shape = torch.Size((len(x), HEADS, 2 * count, CHANNELS))
    each = torch.cat([codec.decode(as_stored(codec, other, x, fp32_params), CHANNELS) for other in blocks], 2)
    assert (codec.decode(block, CHANNELS) - each).abs().max() <= FLOAT32_ATTENTION * each.abs().max()
    check_attention(codec, block, tile, shape)


@pytest.mark.parametrize("form", [("tokens", False), ("matrix", True)], ids=str)
@pytest.mark.parametrize(
    ("count", "dtype"), [(256, torch.uint8), (257, torch.int16), (65536, torch.int16), (65537, torch.int32)]
)
def test_indices_are_as_wide_as_a_segment_is_long(count, dtype, form):
    """Outliers at the last tokens are decoded with indices in bytes, unsigned 16-bit words and 32-bit words."""
    x = randn(1, HEADS, count, 2, seed=3)
    x[:, :, -1], x[:, :, -2] = 50, -50
    codec = Corrected(UniformQuant(4, (None, 1)), Outliers(1e-4, *form))
    pages, records = pools(codec, x, count, 64, False)
    needed = -(-count // 64)
    pages.grow(needed)
    records.grow(1)
    assert records.fields["outliers.tokens"].dtype == dtype
    block = codec.encode(x)
    pages.write_runs(TokenRuns([list(range(needed))], [0]), block)
    records.write_runs(TokenRuns([[0]], [0]), block)
    for number in range(2):
        tile = {**pages.read(slice(0, needed)), **records.read(slice(0, 1))}
        stored = {name: part.mT[:, :, : block[name].shape[2]] for name, part in tile.items()}
        found = codec.decode(stored, 2)
        assert (found[:, :, -2:] - x[:, :, -2:]).abs().max() < 0.05
        assert (found - by_entry(codec, stored, 2)).abs().max() < FLOAT32_ATTENTION * 50
        if number == 0:  # the second time with indices widened for a longer row
            fit(codec, pages, records, x, 70_000, False)
            assert records.fields["outliers.tokens"].dtype == torch.int32


@pytest.mark.parametrize("length", [60, 300])
def test_lists_from_a_file_are_put_in_order(length):
    """`ordered` sorts shuffled entries of outlier lists into the order of the encoder: by token, with unused slots last."""
    x = randn(1, HEADS, length, 8, seed=5)
    found = Outliers(0.2, "tokens", low=torch.tensor(-1.5), high=torch.tensor(1.5))
    codec = Corrected(UniformQuant(4, (None, 1)), found)
    block = codec.encode(x)
    fields = {name: block[OUTLIERS + name] for name in ("delta", "tokens")}
    room = {name: torch.nn.functional.pad(part, (0, 3 * 8)) for name, part in fields.items()}
    entries = {name: part.unflatten(-1, (-1, 8)) for name, part in room.items()}
    order = torch.randperm(entries["delta"].shape[-2], generator=torch.Generator().manual_seed(1))
    shuffled = {name: part[..., order, :].flatten(-2) for name, part in entries.items()}
    kept = {name: part.to(torch.int16) if name == "tokens" else part for name, part in shuffled.items()}
    assert not torch.equal(kept["delta"], room["delta"])
    found.ordered(kept, 8)
    assert torch.equal(kept["delta"], room["delta"]) and torch.equal(kept["tokens"].int(), room["tokens"].int())
    by_channel = entries["tokens"].mT.double().masked_fill(entries["delta"].mT == 0, torch.inf)
    assert (by_channel.diff(dim=-1).nan_to_num(1) > 0).all() and by_channel.isfinite().any()
