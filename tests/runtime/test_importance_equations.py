"""Saliency, the balancer and channel-separable quantisation against the literal equations of the papers."""

import numpy as np
import pytest
import torch
from importance.layer import WINDOW
from importance.oracles import ORACLES
from importance.scenarios import HEADS, OUTPUT, others, tiers_of, zipcache
from layer_walk import Tokens, feed
from tolerances import FLOAT32_ATTENTION

from calib.kernels.probe_saliency.reference import attention_mass
from calib.runtime import compress

pytestmark = pytest.mark.arithmetic


def lattice(x: np.ndarray, decoded: np.ndarray, bits: int, group: int) -> None:
    """Asserts that `decoded [n, D]` are levels of the groups (1, group) of `x`, each the nearest to its value."""
    parts, found = (part.reshape(len(x), x.shape[1] // group, group) for part in (x, decoded))
    high, low = parts.max(-1, keepdims=True), parts.min(-1, keepdims=True)
    scale, zero = (np.float16(value).astype(np.float64) for value in ((high - low) / (2**bits - 1), low))
    levels = (found - zero) / scale
    parts, levels = (part[~np.isnan(found)] for part in ((parts - zero) / scale, levels))
    # A parameter on the border of two float16 numbers may be the other one: 15 levels of 2^-11, twice.
    slack = 2.0**-6
    assert abs(levels - levels.round()).max() < slack
    assert levels.min() > -slack and levels.max() < 2**bits - 1 + slack
    assert abs(levels - parts).max() < 0.5 + slack


def test_values_are_channel_separable_and_tokenwise():
    """ZipCache, eq. 6: v / c in one group a token, c = sqrt(max |v|) over the chunk."""
    scenario = zipcache(tiers=[[4, 1.0]])
    model = scenario.model()
    cache, tokens = compress(model, "zipcache", **scenario.options), Tokens.random(model, 64, seed=4)
    cache.release()
    tokens.values[:, :, :, 3] *= 100
    tokens.values[:, 1, :, 5] = 0
    feed(cache, [tokens])
    for number, layer in enumerate(cache.compressed):
        (keys, values), (no_keys, _) = tiers_of(layer.store, 0)  # the prompt's tier, and that of blocks
        assert no_keys.shape[1] == 0 and not values[1, :, 5].any()  # a channel of zeros is decoded as zeros
        for head in range(2):
            exact, found = tokens.values[number, head].double().numpy(), values[head].astype(np.float64)
            c = np.float16(np.sqrt(abs(exact).max(0))).astype(np.float64)
            moves = c > 0
            c[~moves] = 1
            order = abs(exact[:, None] / c - found / c).mean(-1).argmin(1)
            assert sorted(order) == list(range(64))
            lattice(exact / c, np.where(moves, found[order] / c, np.nan), 4, 32)
            # Keys: one group a channel over the chunk, the range in float16.
            exact, found = tokens.keys[number, head].double().numpy(), keys[head][order].astype(np.float64)
            middle, half = (exact.max(0) + exact.min(0)) / 2, (exact.max(0) - exact.min(0)) / 2
            levels = (found - middle + half) / (2 * half / 15)
            assert abs(levels - levels.round()).max() < 2.0**-6
            assert abs(found - exact).max(0).max() <= (half / 15 * (1 + 2.0**-5)).max()
            assert (abs(found - exact) <= half / 15 * (1 + 2.0**-5)).all()


def test_keys_are_balanced_against_their_queries():
    """MiKV, eq. 2-4: logits are q / b times Q(k b), b = sqrt(max |q| / max |k|)."""
    scenario = others("mikv", important=4, ratio=1.0, gqa=4)
    model = scenario.model()
    cache, tokens = compress(model, "mikv", important=4, ratio=1.0), Tokens.random(model, 64, seed=4)
    cache.release()
    tokens.keys[:, :, :, 7] *= 50
    tokens.queries[:, 2, :, 9] *= 30  # one head of the group is enough
    tokens.keys[:, :, :, 11] = 0
    feed(cache, [tokens])
    (keys, values), (empty, _) = tiers_of(cache.compressed[0].store, 0)
    assert keys.shape == (1, 64, 32) and empty.shape[1] == 0
    queries, exact = tokens.queries[0].double().numpy(), tokens.keys[0, 0].double().numpy()
    largest = abs(exact).max(0)
    b = np.sqrt(abs(queries).max((0, 1)) / np.where(largest, largest, 1))
    b = np.float16(np.where(largest, b, 1)).astype(np.float64)
    found = keys[0].astype(np.float64)
    order = abs(exact[:, None] * b - found * b).mean(-1).argmin(1)
    assert sorted(order) == list(range(64))
    lattice(exact * b, found[order] * b, 4, 16)
    lattice(tokens.values[0, 0].double().numpy(), values[0][order].astype(np.float64), 4, 16)


def mass_by_definition(query, keys, positions, scale, softcap, sliding) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 7 restricted to the rows at `positions`, one row and one head at a time, and how many rows see each token."""
    rows, heads, _, _ = query.shape
    mass, seen = np.zeros((rows, keys.shape[1], keys.shape[2])), np.zeros(keys.shape[2], dtype=int)
    for column, position in enumerate(positions):
        first = 0 if sliding is None else max(0, position - sliding + 1)
        seen[first : position + 1] += 1
        for row in range(rows):
            for head in range(heads):
                mine = head // (heads // keys.shape[1])
                logits = keys[row, mine, first : position + 1] @ query[row, head, column] * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                weights = np.exp(logits - logits.max())
                mass[row, mine, first : position + 1] += weights / weights.sum()
    return mass, seen


@pytest.mark.parametrize("positions", ["all", "some", "one", "last", "long"])
@pytest.mark.parametrize(("softcap", "sliding"), [(None, None), (2.0, None), (None, 17), (5.0, 40)])
@pytest.mark.parametrize("group", HEADS)
def test_saliency_of_given_probe_rows(group, softcap, sliding, positions):
    """Eq. 7 (the sum), eq. 9 (over probe rows) and with the counts eq. 8 (the mean over the rows that see a token)."""
    draw, (heads, kv_heads), total = torch.Generator().manual_seed(group), HEADS[group], 150
    rows = {"all": range(total), "some": [0, 3, 4, 77, 99, 140, 149], "one": [60], "last": [total - 1]}
    if positions == "long":  # several tiles of rows, the last of them not full
        total, rows["long"] = 4000, [*range(0, 4000, 20), *range(3995, 4000)]
    probes = torch.tensor(list(rows[positions]))
    query = 2 * torch.randn(2, heads, total, 32, generator=draw)[:, :, probes]
    keys = 2 * torch.randn(2, kv_heads, total, 32, generator=draw)
    found = attention_mass(query, keys, probes, 32**-0.5, softcap=softcap, sliding=sliding)
    assert found.dtype == torch.float32 and found.shape == (2, kv_heads, total)
    parts = (query.double().numpy(), keys.double().numpy(), probes.tolist())
    mass, seen = mass_by_definition(*parts, 32**-0.5, softcap, sliding)
    np.testing.assert_allclose(found.numpy(), mass, rtol=OUTPUT, atol=1e-12)
    assert abs(found.double().sum(-1).numpy() - len(probes) * group).max() <= FLOAT32_ATTENTION * len(probes) * group
    assert (found.numpy()[:, :, seen == 0] == 0).all()
    normalised = found.double().numpy() / np.maximum(seen, 1)
    assert (normalised <= group * (1 + FLOAT32_ATTENTION)).all()


def test_saliency_is_that_of_the_oracle():
    """The oracle's saliency (eq. 7-9) is the kernel's, for the probe rows that the oracle draws."""
    for kind in ("normalised", "accumulated"):
        layer = ORACLES["zipcache"](recompress=32, saliency=kind, probe_share=0.2)
        model = zipcache().model()
        tokens = Tokens.random(model, 130, seed=1)
        layer.forward(tokens.queries[0], tokens.keys[0], tokens.values[0])
        probes = torch.tensor([token for token in range(130) if layer.is_probe(token)])
        assert len(probes) == 26 and not layer.tokens(WINDOW)[0].size
        mass = attention_mass(tokens.queries[:1][:, :, probes], tokens.keys[:1], probes, 32**-0.5)[0].double().numpy()
        seen = (probes[:, None] >= torch.arange(130)).sum(0).clamp(min=1).numpy()
        expected = mass / seen if kind == "normalised" else mass
        assert abs(layer.saliency - expected).max() <= FLOAT32_ATTENTION * expected.max()
