"""Laws of every codec; each test runs for every row of `tests/support/codec_cases.py`."""

from dataclasses import fields

import pytest
import torch
import yaml
from codec_cases import CHANNELS, CODECS, HEADS, CodecCase
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT32, FLOAT32_ATTENTION

from calib.runtime.device.extremes import Extremes
from calib.runtime.stages import codec as stage
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.contract import Segment
from calib.runtime.stages.parameter_width import may_need_fp32
from calib.runtime.stages.to_device import to_device
from calib.runtime.stages.transform import Identity

pytestmark = pytest.mark.arithmetic

law = settings(derandomize=True, deadline=None, max_examples=20)
every = pytest.mark.parametrize("case", CODECS, ids=str)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("normal", "outlier channel", "tiny", "zero", "large")
SEGMENT = Segment(HEADS, 64)


def tokens(case: CodecCase, kind: str, batch: int, groups: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Random tokens `[batch, kv_heads, groups x token_group, channels]`, clamped to the codec's reach and to float16's range."""
    count = groups * case.codec().token_group()
    x = torch.randn(batch, HEADS, count, case.channels, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier channel":
        x[..., 3] *= 100
    x *= {"tiny": 1e-6, "zero": 0, "large": 2e4}.get(kind, 1)
    return x.clamp(-min(case.reach, 65504), min(case.reach, 65504)).to(dtype)


drawn = given(st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99), st.sampled_from(DTYPES))


def same(one, other) -> bool:
    """Whether two blocks have the same numbers; dtypes may differ."""
    return one.keys() == other.keys() and all(torch.equal(one[name].float(), other[name].float()) for name in one)


def test_every_codec_is_in_the_table():
    """Every exported codec has a row, except `Corrected`, whose own laws run over all codecs (test_corrections)."""
    exported = {getattr(stage, name) for name in stage.__all__} - {stage.Codec, stage.Corrected}
    assert {type(case.codec()) for case in CODECS} == exported


@every
@law
@drawn
def test_what_comes_back_is_within_the_declared_bound(case, kind, batch, groups, seed, dtype):
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    found, bound = codec.decode(codec.encode(x), case.channels), codec.error_bound(x)
    assert found.dtype == torch.float32 and found.shape == x.shape and bool(found.isfinite().all())
    assert bound is not None and bound.shape == x.shape and bool((bound >= 0).all())
    slack = FLOAT32 * x.double().abs().amax()
    assert bool(((found.double() - x.double()).abs() <= bound.double() + slack).all())


@every
@law
@drawn
def test_extremes_stand_for_all_tokens(case, kind, batch, groups, seed, dtype):
    """For a codec with `asks_extremes`, the smallest and largest values alone decide whether parameters need float32, also for
    values beyond float16's range."""
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    if codec.asks_extremes:
        for factor in (1, 2, 2**6, 2**20):
            larger = (x.float() * factor).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
            found = Extremes(larger).read()
            assert codec.fp32_params(found) is codec.fp32_params(larger)
            assert may_need_fp32(codec, dtype) or not codec.fp32_params(larger)


@every
@law
@drawn
def test_a_block_is_what_its_fields_say(case, kind, batch, groups, seed, dtype):
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    block, layout = codec.encode(x), codec.fields(case.channels, dtype, codec.fp32_params(x), SEGMENT)
    assert list(block) == list(layout)
    for name, field in layout.items():
        rows = x.shape[2] // (field.tokens_per_row or x.shape[2])
        assert block[name].shape == (batch, 1 if field.shared else HEADS, rows, field.width), name
        assert block[name].dtype == field.dtype, name
        assert block[name].nbytes == batch * x.shape[2] * field.bytes_per_token(HEADS, x.shape[2]), name
        assert field.values is None or field.values.wrong(block[name]) is None, name


@every
def test_a_value_takes_the_bits_that_are_promised(case):
    layout = case.codec().fields(case.channels, torch.float16, False, SEGMENT).values()
    taken = 8 * sum(field.bytes_per_token(HEADS, SEGMENT.tokens) for field in layout) / (HEADS * case.channels)
    assert taken == pytest.approx(case.bits)


@every
@law
@drawn
def test_rows_and_groups_of_tokens_stand_alone(case, kind, batch, groups, seed, dtype):
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    whole, group = codec.encode(x), codec.token_group()
    for row in range(batch):
        assert same(codec.encode(x[row : row + 1]), {name: part[row : row + 1] for name, part in whole.items()})
    # The rounding of products depends on their shapes, so a codec with products (`row_by_row`) always gets the same pieces; and a
    # codec over all tokens always gets whole segments.
    if not codec.row_by_row and not codec.over_all_tokens:
        last = codec.encode(x[:, :, -group:])
        assert same(last, {name: part[:, :, -last[name].shape[2] :] for name, part in whole.items()})


@every
@law
@drawn
def test_heads_stand_alone_unless_the_codec_says_otherwise(case, kind, batch, groups, seed, dtype):
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    if codec.joins_heads:
        return
    changed = x.clone()
    changed[:, 1] = changed[:, 1].flip(-1) / 2
    first, other = (codec.decode(codec.encode(part), case.channels)[:, 0] for part in (x, changed))
    assert torch.equal(first, other)


@every
@law
@drawn
def test_attention_on_a_tile_is_attention_on_what_it_decodes_to(case, kind, batch, groups, seed, dtype):
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, HEADS, 3, case.channels, generator=draw)
    weights = torch.rand(batch, HEADS, 3, x.shape[2], generator=draw)
    block = codec.encode(x)
    tile = {name: part.mT.contiguous() for name, part in block.items()}
    decoded = codec.decode(block, case.channels).double()
    size = max(1e-30, float(decoded.abs().max())) * max(case.channels, x.shape[2])
    scores, mixed = codec.scores(query, tile), codec.mix(weights, tile, case.channels)
    assert float((scores - query.double() @ decoded.mT).abs().max()) <= FLOAT32_ATTENTION * size
    assert float((mixed - weights.double() @ decoded).abs().max()) <= FLOAT32_ATTENTION * size


@every
@law
@drawn
def test_nothing_that_is_given_is_changed(case, kind, batch, groups, seed, dtype):
    codec, x = case.codec(), tokens(case, kind, batch, groups, seed, dtype)
    before, block = x.clone(), codec.encode(x)
    kept = {name: part.clone() for name, part in block.items()}
    codec.decode(block, case.channels)
    codec.error_bound(x)
    tile = {name: part.mT for name, part in block.items()}
    codec.scores(torch.ones(batch, HEADS, 2, case.channels), tile)
    codec.mix(torch.ones(batch, HEADS, 2, x.shape[2]), tile, case.channels)
    assert torch.equal(x, before) and same(block, kept)


@every
def test_one_token_or_one_group_is_enough(case):
    codec, x = case.codec(), tokens(case, "normal", 1, 1, 0, torch.float32)
    block = encoded(Identity(), codec, x, False)
    assert codec.decode(block, case.channels).shape == x.shape and same(block, codec.encode(x, False))


@every
def test_a_codec_made_again_from_its_options_gives_the_same_bits(case):
    """Plain options are written to YAML and read again, as in a configuration file; tensors are passed as they are."""
    codec, x = case.codec(), tokens(case, "normal", 2, 3, 5, torch.float32)
    own = {field.name: getattr(codec, field.name) for field in fields(codec)}
    plain = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str | tuple | None)}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
    read = yaml.safe_load(yaml.safe_dump(listed))
    read = {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
    again = type(codec)(**own | read)
    assert same(again.encode(x), codec.encode(x))
    assert same(to_device(codec, torch.device("cpu")).encode(x), codec.encode(x))


@every
def test_a_huge_neighbour_leaves_everything_finite_and_a_rows_numbers_alone(case):
    codec = case.codec()
    x = tokens(case, "normal", 2, 2, 1, torch.float32)
    x[1] *= 1e6  # codecs of a limited reach clamp it
    fp32_params = codec.fp32_params(x)
    block = codec.encode(x, fp32_params)
    assert bool(codec.decode(block, case.channels).isfinite().all())
    assert same(codec.encode(x[:1], fp32_params), {name: part[:1] for name, part in block.items()})


def test_the_table_has_heads_that_could_be_joined():
    assert HEADS > 1 and CHANNELS % 16 == 0 and any(case.codec().joins_heads for case in CODECS)
