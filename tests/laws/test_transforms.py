"""Laws of the transforms: the inverse undoes them, and folded queries and outputs give the attention of the original tokens. Of
transforms that are measured on a prompt: the range of the result, and independence of the other rows."""

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from tolerances import FLOAT32_FOLD

from calib.runtime.rotation import Rotation
from calib.runtime.stages.to_device import tensors_of
from calib.runtime.stages.transform import (
    Balancer,
    ChannelRange,
    ChannelScale,
    Identity,
    MeasuredBalancer,
    MeasuredRange,
    MeasuredScale,
    Orthogonal,
    WithoutBias,
)

pytestmark = pytest.mark.arithmetic

law = settings(derandomize=True, deadline=None, max_examples=examples(60))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def transforms(draw):
    """Draw a transform for some heads and channels, tokens `[batch, heads, tokens, channels]`, and a generator for more tensors."""
    heads, channels = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    low = torch.randn(heads, channels, generator=generator) * 5
    high = low + torch.rand(heads, channels, generator=generator) * 9
    if draw(st.booleans()):
        high[:, 0] = low[:, 0]  # a channel that never moved
    scale = torch.rand(heads, 1, channels, generator=generator) * 20 + 0.01
    choices = [
        Identity(),
        ChannelScale(scale),
        Balancer(scale),
        ChannelRange.between(low, high),
        Orthogonal.drawn(channels, 3),
        Orthogonal.hadamard(channels),
        Orthogonal.random_hadamard(channels, 3),
        Orthogonal.of(torch.linalg.qr(torch.randn(heads, channels, channels, generator=generator)).Q),
    ]
    transform = draw(st.sampled_from(choices))
    x = torch.randn(draw(st.integers(1, 3)), heads, draw(st.integers(0, 20)), channels, generator=generator) * 4
    return transform, x.to(draw(st.sampled_from(DTYPES))), generator


def close(found: torch.Tensor, expected: torch.Tensor, size: float) -> bool:
    return bool(((found.double() - expected.double()).abs() <= FLOAT32_FOLD * max(size, 1e-30)).all())


@law
@given(transforms())
def test_inverse_undoes_forward(problem):
    transform, x, _ = problem
    before = x.clone()
    y = transform.forward(x)
    assert y.dtype == torch.float32 and y.shape == x.shape
    size = max([1.0, *(t.abs().max().item() for t in [*transform.tensors(), x] if t.numel())])
    assert close(transform.inverse(y), x, size)
    assert torch.equal(x, before)


@law
@given(transforms())
def test_folding_the_query_keeps_every_score(problem):
    transform, x, generator = problem
    query = torch.randn(x.shape[0], x.shape[1], 3, x.shape[3], generator=generator)
    before = query.clone()
    folded, constant = transform.fold_query(query)
    scores = folded.double() @ transform.forward(x).double().mT
    scores = scores if constant is None else scores + constant.double()
    expected = query.double() @ x.double().mT
    sizes = [1.0, *(t.abs().max().item() for t in [*transform.tensors(), x] if t.numel())]
    assert scores.shape == expected.shape
    assert close(scores, expected, max(sizes) ** 2 * x.shape[3])
    assert torch.equal(query, before)


@law
@given(transforms())
def test_folding_the_output_keeps_every_mixture(problem):
    transform, x, generator = problem
    weights = torch.rand(x.shape[0], x.shape[1], 3, x.shape[2], generator=generator)
    mixed = weights.double() @ transform.forward(x).double()
    found = transform.fold_output(mixed.float(), weights.sum(-1, keepdim=True))
    size = max([1.0, *(t.abs().max().item() for t in [*transform.tensors(), x] if t.numel())])
    assert close(found, weights.double() @ x.double(), size * max(1, x.shape[2]))


@law
@given(st.integers(1, 3), st.integers(1, 12), st.integers(0, 5), st.integers(0, 999), st.sampled_from([1.0, 1.3]))
def test_a_folded_bias_keeps_every_score(heads, pairs, rest, seed, scaling):
    """q.k_t = (T^-T q).y_t + q.R_t b for keys at random positions, also with channels that RoPE does not rotate."""
    draw, channels = torch.Generator().manual_seed(seed), 2 * pairs + rest
    rotation = Rotation(torch.rand(pairs, generator=draw, dtype=torch.float64), scaling)
    bias = 9 * torch.randn(heads, channels, generator=draw)
    stage = WithoutBias(Orthogonal.random_hadamard(channels, 5)).with_bias(bias)
    positions = torch.randint(0, 5000, (2, 7), generator=draw)
    cos, sin = (part[:, None] * scaling for part in rotation.at(positions))
    keys, query = (torch.randn(2, heads, count, channels, generator=draw) for count in (7, 3))
    keys = keys + stage.at(cos, sin)
    own = oracle.rotated(bias[:, None].expand(2, -1, 7, -1), rotation.frequencies, positions[:, None, :, None])
    own[..., : 2 * pairs] *= scaling
    assert close(stage.at(cos, sin), own, float(bias.abs().max()))
    folded, constant = stage.fold_query(query)
    of_positions, besides = stage.of_query(query, pairs)
    assert constant is None and (besides is None) == (rest == 0)
    scores = folded.double() @ stage.forward(keys - stage.at(cos, sin)).double().mT
    scores += of_positions.double() @ torch.cat([cos, sin], -1).double().mT
    scores = scores if besides is None else scores + besides
    size = float(bias.abs().max() * query.abs().max()) * channels
    assert close(scores, query.double() @ keys.double().mT, size)


def test_a_calibrated_range_becomes_minus_one_to_one():
    low, high = torch.tensor([[-3.0, 1.0, 5.0]]), torch.tensor([[1.0, 9.0, 5.0]])
    transform = ChannelRange.between(low, high)
    assert transform.forward(low[:, None])[0, 0].tolist() == [-1, -1, 0]
    assert transform.forward(high[:, None])[0, 0].tolist() == [1, 1, 0]
    assert transform.inverse(torch.zeros(1, 1, 3))[0, 0].tolist() == [-1, 5, 5]


MEASURED = [MeasuredRange(), MeasuredScale(), MeasuredBalancer()]


def prompt(seed: int, magnitude: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys `[2, 2, 30, 8]` and queries `[2, 4, 30, 8]`, both with a channel that is always 0."""
    draw = torch.Generator().manual_seed(seed)
    tokens, query = (magnitude * torch.randn(2, heads, 30, 8, generator=draw) for heads in (2, 4))
    tokens[..., 0] = query[..., 0] = 0
    return tokens, query


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", MEASURED, ids=lambda one: type(one).__name__)
def test_measured_numbers_are_one_for_a_row_head_and_channel_and_finite(recipe, dtype):
    for magnitude in (1e-30, 1.0, 3e4, 1e30):
        tokens, query = prompt(1, magnitude)
        found = recipe.measure(tokens, query, dtype)
        for tensor in tensors_of(found):
            assert tensor.shape == (2, 2, 1, 8) and tensor.dtype == dtype and bool(tensor.isfinite().all())
        assert bool(found.inverse(found.forward(tokens)).isfinite().all())
        neutral = recipe.neutral(tokens[:, :, :1].to(dtype))
        assert torch.equal(neutral.forward(tokens), tokens)


@pytest.mark.parametrize("recipe", MEASURED, ids=lambda one: type(one).__name__)
def test_a_row_is_measured_by_itself_alone(recipe):
    """A row has the same parameters alone and beside a row so large that the parameters of all rows are float32."""
    (mine, query), (wild, _) = prompt(2), prompt(3, 1e9)
    alone = recipe.measure(mine[:1], query[:1], torch.float16)
    beside = recipe.measure(torch.cat([mine[:1], wild]), torch.cat([query[:1], query]), torch.float32)
    for one, other in zip(tensors_of(alone), tensors_of(beside), strict=True):
        assert torch.equal(one[0].float(), other[0])


def test_a_measured_range_becomes_minus_one_to_one():
    tokens, query = prompt(4)
    for dtype, slack in ((torch.float32, 2**-10), (torch.float16, 2**-9)):  # both ends are rounded to 16 bits
        y = MeasuredRange().measure(tokens, query, dtype).forward(tokens)[..., 1:]
        for extreme, end in ((y.amax(2), 1), (y.amin(2), -1)):
            assert bool(((extreme - end).abs() <= 2 * slack).all())


def test_a_measured_scale_is_the_root_of_the_largest():
    tokens, query = prompt(5)
    scale = MeasuredScale().measure(tokens, query, torch.float16).scale
    expected = tokens.abs().amax(2, keepdim=True).sqrt().half()
    assert torch.equal(scale, expected) and bool((scale[..., 0] == 0).all())


def test_a_channel_of_zeros_is_nearly_zero_where_scales_are_frozen_and_comes_back_when_it_moves():
    tokens, query = prompt(5)
    own, frozen = (MeasuredScale(frozen=frozen).measure(tokens, query, torch.float16) for frozen in (False, True))
    assert torch.equal(frozen.scale[..., 1:], own.scale[..., 1:])
    assert torch.equal(frozen.scale[..., 0], own.scale[..., 1:].amin(-1))
    moved = tokens + 1
    assert not own.inverse(own.forward(moved))[..., 0].any()
    assert torch.allclose(frozen.inverse(frozen.forward(moved)), moved)
    nothing = MeasuredScale(frozen=True).measure(torch.zeros_like(tokens), query, torch.float16)
    assert bool((nothing.scale == 1).all())


def test_a_measured_balancer_makes_keys_and_queries_alike():
    """After balancing, the largest key of a channel is as large as the largest query of its group, to 2^-8 (float16 balancer)."""
    tokens, query = prompt(6)
    tokens[..., 3] *= 50
    balancer = MeasuredBalancer().measure(tokens, query, torch.float16)
    folded, constant = balancer.fold_query(query.unflatten(1, (2, 2)).flatten(2, 3))
    keys = balancer.forward(tokens)
    assert constant is None and bool((balancer.balance[..., 0] == 1).all())
    largest = [part.abs().amax(2)[..., 1:] for part in (keys, folded)]
    assert bool((largest[0] / largest[1] - 1).abs().max() < 2**-8)


@pytest.mark.parametrize(
    "made",
    [
        ChannelScale(torch.ones(2, 1, 4)),
        Balancer(torch.ones(2, 1, 4)),
        ChannelRange.between(-torch.ones(2, 4), torch.ones(2, 4)),
    ],
)
def test_tables_are_reported_for_the_memory_count(made):
    held = [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
    assert [id(tensor) for tensor in made.tensors()] == [id(tensor) for tensor in held]
