"""The codebook codec compared with its definition in float64: nearest entries, tables that are a fixed point of k-means, refused
tables.
"""

import numpy as np
import pytest
import torch

from calib.runtime.stages.codec import Codebook, UniformQuant

pytestmark = pytest.mark.arithmetic


def samples(seed: int = 0) -> torch.Tensor:
    """Random samples `[2, 3, 50, 16]` with long tails, and another scale for each head."""
    x = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(seed)) ** 3
    return x * torch.tensor([1.0, 10.0, 0.1])[:, None, None]


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_value_is_its_heads_nearest_entry(bits):
    codec, x = Codebook.of(samples(), bits), samples(1)
    found = codec.decode(codec.encode(x), 16).numpy()
    for head in range(3):
        table, values = codec.table[head].double().numpy(), x[:, head].double().numpy()
        nearest = abs(values[..., None] - table).min(-1)
        np.testing.assert_allclose(abs(found[:, head] - values), nearest, rtol=1e-6, atol=1e-7 * abs(table).max())


def test_an_entry_is_the_mean_of_the_samples_that_are_nearest_to_it():
    codec, x = Codebook.of(samples(), 2), samples()
    index = (codec.decode(codec.encode(x), 16)[..., None] == codec.table[:, None, None]).double().argmax(-1)
    for head in range(3):
        for entry in range(4):
            own = x[:, head][index[:, head] == entry].double()
            assert abs(own.mean() - codec.table[head, entry]) <= 1e-3 * x[:, head].std()


def test_it_follows_a_distribution_with_long_tails_better_than_equal_steps():
    x = samples(2)
    steps = UniformQuant(3, (None, None))
    errors = [(codec.decode(codec.encode(x), 16) - x).square().mean() for codec in (Codebook.of(samples(3), 3), steps)]
    assert errors[0] < errors[1] / 2


def test_one_table_can_serve_all_heads():
    codec, x = Codebook(torch.tensor([[-1.0, 0.0, 1.0, 2.0]])), samples()
    assert set(codec.decode(codec.encode(x), 16).unique().tolist()) == {-1, 0, 1, 2}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Codebook(torch.zeros(2, 3)), r"of 2, 4, 8, ... 256 entries, got torch.float32 \[2, 3\]"),
        (lambda: Codebook(torch.zeros(4)), r"got torch.float32 \[4\]"),
        (lambda: Codebook(torch.zeros(1, 4).half()), "got torch.float16"),
        (lambda: Codebook(torch.tensor([[0.0, -1.0]])), "rising in each row; sort it"),
        (lambda: Codebook(torch.tensor([[0.0, torch.inf]])), "finite and rising"),
        (lambda: Codebook.of(samples(), 9), "bits must be a whole number 1 ... 8, got 9"),
        (lambda: Codebook.of(samples()[:, :, :0], 2), "needs samples to be fitted to, got none"),
    ],
)
def test_tables_that_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
