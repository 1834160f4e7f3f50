"""Trellis-coded components: the encoder finds the best path, decoding is as specified, and tokens are encoded independently."""

import numpy as np
import pytest
import torch
from trellis_paths import least_cost, trellis_components

from calib.runtime.stages.codec import MixedQuant, Sized, TrellisQuant
from calib.runtime.stages.codec.encoded import encoded
from calib.runtime.stages.transform import Identity

pytestmark = pytest.mark.arithmetic

WIDTHS, COUNTS = (5, 4, 3, 2, 1, 1), (2, 0, 1)
COMPONENTS = len(WIDTHS) * max(COUNTS)


def codec(seed=0):
    draw = torch.Generator().manual_seed(seed)
    weights = torch.rand(len(COUNTS), 1, COMPONENTS, generator=draw) + 0.1
    for head, count in enumerate(COUNTS):
        weights[head].view(len(WIDTHS), -1)[:, count:] = 0
    return TrellisQuant(WIDTHS, COUNTS, weights)


def components(tokens=40, rows=2, spread=0.5, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, len(COUNTS), tokens, COMPONENTS, generator=draw)


def along_path(x, head):
    """The components of one head, `x [..., components]` plane by plane, in the order of the path: word by word."""
    return x.reshape(*x.shape[:-1], len(WIDTHS), -1).swapaxes(-1, -2)[..., : COUNTS[head], :].reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("spread", [0.1, 0.5, 3.0])
def test_no_path_is_better(spread):
    """The encoded path costs as little as the best of all 2^6 or 2^12 paths in float64, for components within the levels, about as
    wide, and far outside."""
    quant, y = codec(), components(3, 1, spread)
    held = trellis_components(quant.encode(y)["words"].numpy(), WIDTHS, COUNTS)
    for head, count in enumerate(COUNTS):
        weights = along_path(quant.weights[head, 0].double().numpy(), head)
        for token in range(y.shape[2]):
            given, kept = (along_path(part[0, head, token], head) for part in (y.double().numpy(), held))
            cost = float((weights * (kept - given)) ** 2 @ np.ones(len(given)))
            assert cost <= least_cost(given, WIDTHS * count, weights) * (1 + 1e-5) + 1e-12


def test_words_say_what_is_decoded():
    quant, y = codec(), components()
    block = quant.encode(y)
    assert block["words"].shape == (2, 1, 40, sum(COUNTS)) and block["words"].dtype == torch.int16
    held = trellis_components(block["words"].numpy(), WIDTHS, COUNTS)
    found = quant.decode(block, COMPONENTS).double().numpy()
    own = ~np.isnan(held)
    assert own.any() and (found[own] == held[own]).all()


def test_any_words_can_be_read():
    """Random words, also ones that the encoder never writes, are decoded as the oracle decodes them."""
    words = torch.randint(-(2**15), 2**15, (2, 1, 50, sum(COUNTS)), generator=torch.Generator().manual_seed(3))
    words = words.to(torch.int16)
    held = trellis_components(words.numpy(), WIDTHS, COUNTS)
    own = ~np.isnan(held)
    assert (codec().decode({"words": words}, COMPONENTS).double().numpy()[own] == held[own]).all()


@pytest.mark.parametrize("sized", [False, True])
def test_a_token_has_the_same_words_in_any_company(sized):
    quant = codec()
    quant = Sized(quant, quant.weights) if sized else quant
    y = components(700, 4)

    def words(part):
        return quant.encode(part)["words"]

    together, order = words(y), torch.randperm(700, generator=torch.Generator().manual_seed(5))
    assert torch.equal(together[2:3, :, ::50], torch.cat([words(y[2:3, :, [t]]) for t in range(0, 700, 50)], 2))
    assert torch.equal(together[:, :, order], words(y[:, :, order]))
    assert torch.equal(together.flip(0), words(y.flip(0)))
    pieces = encoded(Identity(), quant, y.repeat(1, 1, 40, 1), False)
    assert torch.equal(pieces["words"], together.repeat(1, 1, 40, 1))


def test_what_lies_far_outside_leaves_the_others_their_digits():
    """A component of 1e6 and one of 10, both beyond the outermost level, give the same words."""
    quant, y = codec(), components(200, 1)
    near, far = y.clone(), y.clone()
    near[..., 1], far[..., 1] = 10, 1e6
    assert torch.equal(quant.encode(near)["words"], quant.encode(far)["words"])


@pytest.mark.parametrize(("bits", "gained"), [(1, 0.5), (2, 0.85), (4, 0.8)])
def test_what_it_gains_on_gaussian_components(bits, gained):
    """The gain in decibels over uniform codes on Gaussian components, each with a step that is good for its levels."""
    y = torch.randn(1, 1, 1500, 64, generator=torch.Generator().manual_seed(0))
    widths, counts = (bits,) * (16 // bits), (64 * bits // 16,)
    best = {}
    for name, quant, steps in (
        ("uniform", MixedQuant(widths, counts), {1: (1.596,), 2: (0.9957,), 4: (0.3352,)}[bits]),
        ("trellis", TrellisQuant(widths, counts, torch.ones(1, 1, 64)), {1: (0.78,), 2: (0.5,), 4: (0.17,)}[bits]),
    ):
        for step in steps:
            unit = step / float(quant.step(y.device)[0])
            error = float((quant.decode(quant.encode(y / unit), 64) * unit - y).square().mean())
            best[name] = min(error, best.get(name, error))
    assert 10 * np.log10(best["uniform"] / best["trellis"]) > gained


def test_attention_on_words_is_attention_on_what_they_hold():
    quant, draw = codec(), torch.Generator().manual_seed(7)
    block = quant.encode(components())
    held, tile = quant.decode(block, COMPONENTS).double(), {"words": block["words"].mT.contiguous()}
    query, weights = (torch.randn(2, len(COUNTS), 5, n, generator=draw) for n in (COMPONENTS, 40))
    own = quant.weights > 0  # components without a word have no meaning
    query, held = query * own, held * own
    torch.testing.assert_close(quant.scores(query, tile).double(), query.double() @ held.mT, rtol=0, atol=1e-4)
    mixed = quant.mix(weights, tile, COMPONENTS).double() * own
    torch.testing.assert_close(mixed, weights.double() @ held, rtol=0, atol=1e-4)
    codes = quant.codes(tile)
    most = quant.levels(codes.device)[:, None]
    assert codes.dtype == torch.int16 and bool((codes >= 0).all()) and bool((codes <= most).all())
