"""Laws of the transforms: an exact inverse, and folds that let attention work on transformed tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT32_FOLD

from calib.runtime.stages.transform import ChannelRange, ChannelScale, Identity

law = settings(derandomize=True, deadline=None, max_examples=60)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def transforms(draw):
    """A transform for some heads and channels, and tokens `[batch, heads, tokens, channels]`."""
    heads, channels = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    low = torch.randn(heads, channels, generator=generator) * 5
    high = low + torch.rand(heads, channels, generator=generator) * 9
    if draw(st.booleans()):
        high[:, 0] = low[:, 0]  # a channel that never moved
    scale = torch.rand(heads, 1, channels, generator=generator) * 20 + 0.01
    transform = draw(st.sampled_from([Identity(), ChannelScale(scale), ChannelRange.between(low, high)]))
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
    found = transform.fold_output(mixed.float(), weights)
    size = max([1.0, *(t.abs().max().item() for t in [*transform.tensors(), x] if t.numel())])
    assert close(found, weights.double() @ x.double(), size * max(1, x.shape[2]))


def test_a_calibrated_range_becomes_minus_one_to_one():
    low, high = torch.tensor([[-3.0, 1.0, 5.0]]), torch.tensor([[1.0, 9.0, 5.0]])
    transform = ChannelRange.between(low, high)
    assert transform.forward(low[:, None])[0, 0].tolist() == [-1, -1, 0]
    assert transform.forward(high[:, None])[0, 0].tolist() == [1, 1, 0]
    assert transform.inverse(torch.zeros(1, 1, 3))[0, 0].tolist() == [-1, 5, 5]


@pytest.mark.parametrize(
    "made", [ChannelScale(torch.ones(2, 1, 4)), ChannelRange.between(-torch.ones(2, 4), torch.ones(2, 4))]
)
def test_tables_are_reported_for_the_memory_count(made):
    held = [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
    assert [id(tensor) for tensor in made.tensors()] == [id(tensor) for tensor in held]
