"""`largest_magnitude`, one pass over the data, gives the bits of `abs().amax()`."""

import pytest
import torch

from calib.kernels.magnitude import largest_magnitude

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_as_in_two_passes(dtype):
    x = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = -x[0, 0].abs()  # a channel whose largest is its lowest
    x[1, 2, :, 3] = -0.0
    for found, expected in (
        (largest_magnitude(x), x.abs().max()),
        (largest_magnitude(x, 2), x.abs().amax(2, keepdim=True)),
    ):
        assert found.dtype == dtype
        assert torch.equal(found, expected)
        assert not found.signbit().any(), "a root of -0.0 would be -0.0"


def test_infinities_and_nan():
    x = torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0]])
    assert torch.equal(largest_magnitude(x[:1]), torch.tensor(torch.inf))
    assert largest_magnitude(x).isnan()
    assert torch.equal(largest_magnitude(x, 0).isnan(), torch.tensor([[True, False]]))
