"""Attention mass of probes is computed without the whole attention matrix: no tensor is larger than a tile or one number per query
head and key."""

import pytest
import torch
from host_waits import Operations

from calib.kernels.probe_saliency.reference import TILE_ELEMENTS, attention_mass

pytestmark = pytest.mark.arithmetic

HEADS, KV_HEADS, CHANNELS = 8, 2, 16


@pytest.mark.parametrize("rows", [8, 819, 8192])
def test_no_tensor_is_larger_than_a_tile_at_8192_tokens(rows):
    draw = torch.Generator().manual_seed(0)
    tokens = 8192
    query = torch.randn(1, HEADS, rows, CHANNELS, generator=draw)
    keys = torch.randn(1, KV_HEADS, tokens, CHANNELS, generator=draw)
    with Operations() as operations:
        mass = attention_mass(query, keys, torch.arange(tokens - rows, tokens), CHANNELS**-0.5)
    assert operations.largest <= max(TILE_ELEMENTS, HEADS * tokens)
    # Every probe's attention sums to 1 in each of its heads.
    assert mass.double().sum(-1)[0].tolist() == pytest.approx([rows * HEADS / KV_HEADS] * KV_HEADS, rel=1e-4)


def test_one_row_may_be_longer_than_a_tile():
    keys = torch.randn(1, 1, TILE_ELEMENTS + 5, 2, generator=torch.Generator().manual_seed(0))
    query = torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    mass = attention_mass(query, keys, torch.tensor([7, TILE_ELEMENTS + 4]), 1.0)
    assert mass.double().sum().item() == pytest.approx(2, rel=1e-4)
    assert (mass[0, 0, 8:] > 0).all()
