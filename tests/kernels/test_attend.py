"""Attention on codes against attention on decoded tokens in float64: scores, mixtures, and a softmax that is run tile by tile."""

import numpy as np
import oracle
import pytest
import torch
from tolerances import FLOAT32_ATTENTION

from calib.kernels.attend.reference import RunningSoftmax
from calib.runtime.stages.codec import Exact, UniformQuant

pytestmark = pytest.mark.arithmetic

GROUPS = [(1, None), (1, 8), (8, 1), (32, 1), (4, 4), (32, 32), (1, 1), None]


def decoded(codec, block, channels: int) -> torch.Tensor:
    """Decode a block by the oracle (numpy, float64)."""
    if isinstance(codec, Exact):
        return block["exact"].double()
    codes = oracle.unpacked(block["words"].numpy(), codec.bits, channels)
    if codec.group is None:
        clip = torch.as_tensor(codec.clip, dtype=torch.float64).numpy()
        return torch.from_numpy(codes * (2 * clip / (2**codec.bits - 1)) - clip)
    scale, zero = oracle.scale_and_zero(block)
    return torch.from_numpy(codes * oracle.spread(scale, *codes.shape[-2:]) + oracle.spread(zero, *codes.shape[-2:]))


def codecs(bits: int):
    per_head = torch.tensor([0.7, 0.9])[:, None, None]
    return [Exact(), *(UniformQuant(bits, group, clip) for group in GROUPS for clip in (1.0, per_head))]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == torch.float32
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("number", range(len(codecs(2))), ids=lambda n: str(n))
@pytest.mark.parametrize("channels", [32, 64])
def test_scores_and_mixtures_are_those_of_the_decoded_tokens(bits, number, channels):
    codec, draw = codecs(bits)[number], torch.Generator().manual_seed(bits)
    x = torch.randn(3, 2, 96, channels, generator=draw) + torch.randn(channels, generator=draw)
    block = codec.encode(x)
    tile = {name: part.mT for name, part in block.items()}  # as attention reads it: tokens last
    query = torch.randn(3, 2, 6, channels, generator=draw)
    weights = torch.rand(3, 2, 6, 96, generator=draw)
    tokens = decoded(codec, block, channels)
    assert relative(codec.scores(query, tile), query.double() @ tokens.mT) < FLOAT32_ATTENTION
    assert relative(codec.mix(weights, tile, channels), weights.double() @ tokens) < FLOAT32_ATTENTION
    np.testing.assert_allclose(codec.decode(block, channels), tokens, rtol=0, atol=FLOAT32_ATTENTION)


@pytest.mark.parametrize("cuts", [[40], [1, 39], [7, 7, 26], [1] * 40])
def test_tiles_meet_in_one_softmax(cuts):
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 4, 40, generator=draw) * 20
    values = torch.randn(2, 3, 40, 16, generator=draw)
    softmax = RunningSoftmax()
    for part, value in zip(scores.split(cuts, -1), values.split(cuts, -2), strict=True):
        softmax.add(softmax.weights(part) @ value)
    expected = scores.double().softmax(-1) @ values.double()
    assert relative(softmax.output(), expected) < FLOAT32_ATTENTION
    log_sum = softmax.top + softmax.mass.log()
    assert relative(log_sum, scores.double().logsumexp(-1, keepdim=True)) < FLOAT32_ATTENTION


def test_masked_tokens_and_tiles_weigh_nothing():
    draw = torch.Generator().manual_seed(1)
    scores, values = torch.randn(1, 1, 3, 30, generator=draw), torch.randn(1, 1, 30, 8, generator=draw)
    hidden = torch.zeros(3, 30, dtype=torch.bool)
    hidden[0, :10] = True  # the whole first tile of row 0
    hidden[1, ::2] = True
    hidden[2] = True  # everything
    softmax = RunningSoftmax()
    for at in (0, 10, 20):
        tile = scores[..., at : at + 10].masked_fill(hidden[:, at : at + 10], -torch.inf)
        weights = softmax.weights(tile)
        assert bool(torch.isfinite(weights).all())
        softmax.add(weights @ values[..., at : at + 10, :])
    expected = scores.masked_fill(hidden, -torch.inf)[..., :2, :].double().softmax(-1) @ values.double()
    assert relative(softmax.output()[..., :2, :], expected) < FLOAT32_ATTENTION
    assert bool((softmax.output()[..., 2, :] == 0).all())


def test_logits_of_any_size_stay_finite():
    softmax = RunningSoftmax()
    for size in (-1e30, 0.0, 3e4, 1e30):
        softmax.add(softmax.weights(torch.full((1, 1, 1, 2), size)) @ torch.full((1, 1, 2, 4), size / 1e30))
    assert softmax.output().tolist() == [[[[1.0] * 4]]]
