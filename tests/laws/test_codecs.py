"""Laws of `UniformQuant` and `Exact` against a float64 oracle: codes, parameters, error bound, bytes, independence of rows."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from tolerances import BORDER, FLOAT32

from calib.runtime.stages.codec import Exact, UniformQuant
from calib.runtime.stages.codec.encoded import at_once, encoded
from calib.runtime.stages.transform import Identity

pytestmark = pytest.mark.arithmetic

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = [(1, None), (1, 8), (8, 1), (4, 4), (None, 1), (None, None), (2, 16), None]
KINDS = ("normal", "outlier channel", "outlier token", "offset", "tiny", "steps", "large")
law = settings(derandomize=True, deadline=None, max_examples=examples(120))


def tokens(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random tokens `[batch, kv_heads, tokens, channels]` of one kind."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw)
    if kind == "outlier channel":
        x[..., 0] *= 100
    elif kind == "outlier token":
        x[..., 0, :] *= 300
    elif kind == "offset":
        x = x * 0.01 + 40
    elif kind == "tiny":
        x *= 1e-6
    elif kind == "steps":
        x = (x * 2).round() / 4
    elif kind == "large":
        x = (x * 2e4).clamp(-65504, 65504)
    return x.to(dtype)


@st.composite
def problems(draw):
    """Draw a `UniformQuant` and tokens `[batch, kv_heads, tokens, channels]` that it can encode."""
    bits, group = draw(st.integers(1, 8)), draw(st.sampled_from(GROUPS))
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = (batch, heads, 8 * draw(st.integers(1, 4)), 16 * draw(st.integers(1, 4)))
    seed = draw(st.integers(0, 999))
    clip = draw(st.sampled_from([1.0, 1 - 2.0**-bits, 0.8, 0.3, "a head"]))
    if clip == "a head":
        clip = 0.3 + 0.7 * torch.rand(heads, 1, 1, generator=torch.Generator().manual_seed(seed))
    x = tokens(draw(st.sampled_from(KINDS)), shape, draw(st.sampled_from(DTYPES)), seed)
    return UniformQuant(bits, group, clip), x


def stored_parameters(codec: UniformQuant, x: torch.Tensor, block) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of every value, float64 `[..., tokens, channels]`, as stored; of a fixed range, the codec's."""
    if codec.group is not None:
        return tuple(oracle.spread(part, *x.shape[-2:]) for part in oracle.scale_and_zero(block))
    clip = torch.as_tensor(codec.clip, dtype=torch.float32).double()
    scale = (clip.float() * (2 / (2**codec.bits - 1))).double()  # the float32 numbers the codec keeps
    return scale.expand(x.shape).numpy(), (-clip).expand(x.shape).numpy()


@law
@given(problems())
def test_codes_are_the_oracles(problem):
    codec, x = problem
    block = codec.encode(x)
    scale, zero = stored_parameters(codec, x, block)
    level = oracle.level(x.double().numpy(), scale, zero)
    found = oracle.unpacked(block["words"].numpy(), codec.bits, x.shape[-1])
    # At a tie, or so near the border of two codes that float32 may round to either side, either neighbour is right. All other codes
    # must be equal, except with a scale of 0, where any code decodes to the zero point.
    clear = (np.abs(level - np.round(level)) > BORDER) & (scale > 0)
    assert (found == oracle.codes_at(level, codec.bits))[clear].all()
    assert (np.abs(found - oracle.codes_at(level, codec.bits)) <= 1)[scale > 0].all()
    assert (found <= 2**codec.bits - 1).all()


@law
@given(problems())
def test_stored_parameters_are_the_oracles_rounded(problem):
    codec, x = problem
    if codec.group is None:
        assert set(codec.encode(x)) == {"words"}  # the artifact holds the range
        return
    block, sizes = codec.encode(x), (codec.group[0] or x.shape[-2], codec.group[1] or x.shape[-1])
    clips = torch.as_tensor(codec.clip).expand(x.shape[1], 1, 1)[:, 0, 0].tolist()
    stored = oracle.scale_and_zero(block)
    for at in np.ndindex(*stored[0].shape):
        row, head, i, j = at
        part = x[row, head, i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
        expected = oracle.parameters(part.double().numpy(), codec.bits, clips[head])
        for found, value in zip(stored, expected, strict=True):
            # Parameters within float16's range are rounded to float16 even in a block that is float32 because of larger ones.
            unit = torch.finfo(torch.float16 if abs(value) <= 65504 else torch.float32)
            size = max(abs(value), abs(expected[0]))
            assert abs(found[at] - value) <= unit.eps * size + unit.smallest_normal * unit.eps


@law
@given(problems())
def test_decoding_is_scale_times_code_plus_zero(problem):
    codec, x = problem
    block = codec.encode(x)
    scale, zero = stored_parameters(codec, x, block)
    codes = oracle.unpacked(block["words"].numpy(), codec.bits, x.shape[-1])
    expected = codes * scale + zero
    decoded = codec.decode(block, x.shape[-1])
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape
    largest = np.abs(zero).max() + (scale * 2**codec.bits).max()
    np.testing.assert_allclose(decoded.double().numpy(), expected, rtol=0, atol=FLOAT32 * largest)


@law
@given(problems())
def test_the_error_is_within_the_declared_bound(problem):
    codec, x = problem
    bound = codec.error_bound(x)
    assert bound.shape == x.shape and bool(torch.isfinite(bound).all())
    error = (codec.decode(codec.encode(x), x.shape[-1]).double() - x.double()).abs()
    assert bool((error <= bound.double()).all()), (error - bound).max()


@law
@given(problems())
def test_the_bound_is_not_generous(problem):
    codec, x = problem
    if codec.group is None or not isinstance(codec.clip, float) or codec.clip < 1:
        return
    # At most half a step, and twice the rounding errors of the two 16-bit parameters.
    sizes = (codec.group[0] or x.shape[-2], codec.group[1] or x.shape[-1])
    wide = x.double().unflatten(-1, (-1, sizes[1])).unflatten(-3, (-1, sizes[0]))
    reach = (wide.amax((-3, -1)) - wide.amin((-3, -1))).numpy()
    step = oracle.spread(reach / (2**codec.bits - 1), *x.shape[-2:])
    half, reach = torch.finfo(torch.float16), x.double().abs().amax().item() + step * 2**codec.bits
    parameters = 2 * (half.eps * reach + half.smallest_normal * 2**codec.bits)
    assert (codec.error_bound(x).double().numpy() <= step / 2 + 2 * parameters).all()


@law
@given(problems())
def test_a_block_weighs_what_its_fields_say(problem):
    codec, x = problem
    if codec.group is not None and codec.group[0] is None:
        return  # pages refuse a group over all tokens (test_codec_edges)
    block = codec.encode(x)
    fields = codec.fields(x.shape[-1], x.dtype, codec.fp32_params(x))
    assert list(block) == list(fields)
    for name, field in fields.items():
        rows = x.shape[-2] // field.tokens_per_row
        assert block[name].shape == (*x.shape[:-2], rows, field.width) and block[name].dtype == field.dtype
        assert block[name].numel() * block[name].element_size() == x[..., 0].numel() * field.bytes_per_token()


@law
@given(problems())
def test_a_row_alone_gives_the_same_bits(problem):
    codec, x = problem
    together = codec.encode(x)
    for row in range(x.shape[0]):
        alone = codec.encode(x[row : row + 1])
        for name, part in together.items():
            assert torch.equal(alone[name][0].float(), part[row].float()), name
    half = codec.token_group() if codec.group is None or codec.group[0] is not None else x.shape[-2]
    first = codec.encode(x[:, :, :half])
    for name, part in first.items():
        assert torch.equal(part.float(), together[name][:, :, : part.shape[2]].float()), name


@law
@given(problems(), st.sampled_from([1, 2**9, 2**11, 2**20]), st.booleans(), st.booleans())
def test_pieces_give_the_bits_of_the_whole(problem, piece, across_heads, ordered):
    codec, x = problem
    if across_heads and codec.group is not None and codec.group[1] is None:
        codec = UniformQuant(codec.bits, codec.group, 0.9, across_heads=True)
    order = (
        torch.randperm(x.shape[2], generator=torch.Generator().manual_seed(1)).expand(*x.shape[:3]) if ordered else None
    )
    given_order, wide = x if order is None else x[:, :, order[0, 0]], codec.fp32_params(x)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(UniformQuant, "piece", piece)
        most = at_once(codec, x, x.shape[2])
        assert most == x.shape[2] if codec.over_all_tokens else most % codec.token_group() == 0
        assert most <= max(piece // x[:, :, 0].numel(), codec.token_group()) or codec.over_all_tokens
        found = encoded(Identity(), codec, x, wide, order)
    expected = codec.encode(given_order, wide)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], part) for name, part in expected.items())


@law
@given(problems())
def test_the_input_is_not_changed(problem):
    codec, x = problem
    before = x.clone()
    block = codec.encode(x)
    copies = {name: part.clone() for name, part in block.items()}
    codec.decode(block, x.shape[-1])
    codec.error_bound(x)
    weights = torch.ones(*x.shape[:-2], 2, x.shape[-2])
    query = torch.ones(*x.shape[:-2], 2, x.shape[-1])
    tile = {name: part.mT for name, part in block.items()}
    codec.scores(query, tile)
    codec.mix(weights, tile, x.shape[-1])
    assert torch.equal(x, before)
    assert all(torch.equal(part, copies[name]) for name, part in block.items())
    assert bool((weights == 1).all() and (query == 1).all())


@law
@given(st.integers(0, 99), st.sampled_from(DTYPES), st.integers(1, 20))
def test_exact_keeps_every_bit(seed, dtype, channels):
    x = tokens("normal", (2, 2, 5, channels), dtype, seed)
    codec = Exact()
    block = codec.encode(x)
    field = codec.fields(channels, dtype)["exact"]
    assert torch.equal(codec.decode(block, channels), x.float())
    assert bool((codec.error_bound(x) == 0).all())
    assert block["exact"].numel() * block["exact"].element_size() == 2 * 2 * 5 * field.bytes_per_token()
