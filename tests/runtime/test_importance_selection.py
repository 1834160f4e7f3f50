"""The oracle of the importance methods by itself: selections that can be worked out by hand."""

import math

import numpy as np
import pytest
from importance.budget import H2O, MiKV
from importance.chunks import ZipCache
from importance.draws import count, counter_hash
from importance.layer import WINDOW
from importance.positions import StreamingLLM, TopK
from importance.toy_rows import DIM, HEADS, KV_HEADS, drawn, row_of, walk

pytestmark = pytest.mark.arithmetic

# --- saliency -------------------------------------------------------------------------------------------------------


def test_the_two_saliencies_by_hand():
    # Rows: 1 | 1/2 1/2 | 1/8 1/8 6/8.
    parts = row_of([1, 1, 6])
    for kind, expected, first in (
        ("accumulated", [1.625, 0.625, 0.75], 0),
        ("normalised", [1.625 / 3, 0.3125, 0.75], 2),
    ):
        method = ZipCache([[16, 0.34], [0, 0.66]], recompress=3, probes="all", saliency=kind)
        method.forward(*parts)
        np.testing.assert_allclose(method.saliency[0], expected)
        assert method.tokens(0)[0].tolist() == [first]
        ordered = sorted(expected, reverse=True)
        assert math.isclose(method.margin, 1 - ordered[1] / ordered[0])


def test_only_probe_rows_that_see_a_token_count():
    method = ZipCache([[16, 0.5], [0, 0.5]], recompress=4, probes="recent", probe_share=0.5)  # rows 2 and 3
    method.forward(*row_of([1, 1, 2, 4]))
    sums = np.array([1 / 4 + 1 / 8, 1 / 4 + 1 / 8, 1 / 2 + 1 / 4, 1 / 2])
    np.testing.assert_allclose(method.saliency[0], sums / [2, 2, 2, 1])


def test_a_token_that_no_probe_sees_has_no_saliency():
    method = ZipCache([[16, 0.5], [0, 0.5]], recompress=8, probes="random", probe_share=0.125)
    last = next(seed for seed in range(99) if min(range(8), key=lambda t: counter_hash(seed, 0, 0, t)) == 2)
    method.seed = last
    method.forward(*row_of([1.0] * 8))
    np.testing.assert_allclose(method.saliency[0], [1 / 3] * 3 + [0] * 5)
    assert method.tokens(0)[0].tolist() == [0, 1, 2, 3]  # ties, of thirds and of zeros, go to the earlier


@pytest.mark.parametrize(("probes", "rows"), [("all", 60), ("recent", 6), ("random", 6), ("random+recent", 6)])
def test_saliency_sums_to_probe_rows_times_group(probes, rows):
    method = ZipCache(probes=probes, saliency="accumulated", recompress=50)
    method.forward(*drawn(60))
    assert sum(map(method.is_probe, range(60))) == rows
    np.testing.assert_allclose(method.saliency.sum(1), rows * HEADS / KV_HEADS)


def test_accumulated_scores_sum_to_tokens_times_group():
    method = MiKV(budget=100)
    walk(method, drawn(45), 30, 31, 45)
    np.testing.assert_allclose(method.saliency.sum(1), 45 * HEADS / KV_HEADS)


def test_probe_rows_of_a_block_of_decode():
    method = ZipCache(seed=5, layer=3)
    walk(method, drawn(130), 120, 130)
    positions = {probes: [] for probes in ("random+recent", "random", "recent", "all")}
    for probes, found in positions.items():
        method.probes = probes
        found += [token - 119 for token in range(120, 320) if method.is_probe(token)]
    chance = {token - 119: counter_hash(5, 3, 0, token) / 2**32 for token in range(120, 320)}
    late = {position for position in range(1, 201) if (position - 1) % 100 >= 95}
    assert set(positions["random+recent"]) == late | {position for position in chance if chance[position] < 0.05}
    assert set(positions["random"]) == {100, 200} | {position for position in chance if chance[position] < 0.1}
    assert positions["recent"] == [*range(91, 101), *range(191, 201)] and len(positions["all"]) == 200


# --- chunks and tiers -----------------------------------------------------------------------------------------------


def test_chunks_of_a_short_prompt_and_of_a_long_one():
    for cuts, windows in {(7, 9, 10, 25): [7, 9, 0, 5], (13, 14, 22, 23, 44): [0, 1, 9, 0, 1]}.items():
        method, parts, start = ZipCache([[4, 0.1], [2, 0.5], [0, 0.4]], recompress=10), drawn(45), 0
        for stop, window in zip(cuts, windows, strict=True):
            method.forward(*[part[:, start:stop] for part in parts])
            assert [len(held) for held in method.tokens(WINDOW)] == [window] * KV_HEADS
            start = stop
        chunks = [method.prompt if method.prompt >= 10 else 10] + [10] * 3
        done = [sum(chunks[: at + 1]) <= start for at in range(4)]
        sizes = [size for size, whole in zip(chunks, done, strict=True) if whole]
        for tier, share in ((0, 0.1), (1, 0.5)):
            for own, part in ((tier, sizes[:1]), (tier + 3, sizes[1:])):  # blocks lie in tiers of their own
                assert [len(held) for held in method.tokens(own)] == [
                    sum(count(share, size) for size in part)
                ] * KV_HEADS


def test_a_stored_chunk_is_never_encoded_again():
    method, parts = ZipCache(recompress=10), drawn(45)
    walk(method, parts, 20)
    keys, values, tiers = method.keys.copy(), method.values.copy(), method.tier.copy()
    for at in range(20, 45):
        method.forward(*[part[:, at : at + 1] for part in parts])
    for old, new in ((keys, method.keys), (values, method.values), (tiers, method.tier)):
        assert np.array_equal(old, new[:, :20])


# --- heavy and recent -----------------------------------------------------------------------------------------------


def test_heavy_hitters_by_hand():
    method, zero = H2O(heavy=1, recent=2), row_of([1.0] * 8)
    zero[0] *= 0  # every row attends alike to all it sees
    parts = [[part[:, start:stop] for part in zero] for start, stop in ((0, 4), (4, 5), (5, 6))]
    method.forward(*parts[0])
    np.testing.assert_allclose(method.saliency[0], [25 / 12, 13 / 12, 7 / 12, 1 / 4])
    assert method.tokens(0)[0].tolist() == [0, 2, 3]
    output = method.forward(*parts[1])
    np.testing.assert_allclose(output[0, 0, 0], (0 + 2 + 3 + 4) / 4)
    np.testing.assert_allclose(method.saliency[0, [0, 2, 3, 4]], [28 / 12, 10 / 12, 1 / 2, 1 / 4])
    assert method.tokens(0)[0].tolist() == [0, 3, 4]
    np.testing.assert_allclose(method.forward(*parts[2])[0, 0, 0], (0 + 3 + 4 + 5) / 4)
    assert math.isclose(method.margin, 1 - 13 / 25)


def test_budgets():
    for method, prompt, budgets in (
        (H2O(), 49, (9, 9)),
        (H2O(3, 0.5), 49, (3, 24)),
        (MiKV(0.2), 50, (5, 5)),
        (MiKV(0.2), 51, (5, 6)),
        (MiKV(0.2), 1, (0, 1)),
        (MiKV(budget=9), 1, (4, 5)),
        (MiKV(budget=9, recent=2), 1, (7, 2)),
    ):
        method.prompt = prompt
        assert method.budgets() == budgets


def test_demotion_decodes_and_encodes_again():
    method = MiKV(important=4, retained=2, balancer=False, group=16, budget=1)
    ramp = np.arange(16.0)[None, None] * np.array([1, 2, 1])[:, None]  # three tokens that 4 bits hold exactly
    for token in range(2):
        method.forward(0 * ramp[:, token : token + 1], ramp[:, token : token + 1], ramp[:, token : token + 1] - 7)
    assert method.tokens(0)[0].tolist() == [1] and method.tokens(1)[0].tolist() == [0]
    lattice = np.array([0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10, 15, 15, 15.0])
    assert method.keys[0, 0].tolist() == lattice.tolist() and method.values[0, 0].tolist() == (lattice - 7).tolist()
    assert method.keys[0, 1].tolist() == (2 * np.arange(16.0)).tolist()


def test_the_balancer_by_hand():
    method = MiKV(important=2, retained=2, ratio=1.0, group=2)
    query = np.array([[[1.0, 0.5], [-12, 0]], [[2, 0], [1, 9]]])
    keys = np.array([[[3.0, 0], [0.75, 0]]])
    method.forward(query, keys, keys)
    assert method.balance.tolist() == [[2, 1]]  # sqrt(12 / 3); a channel without keys keeps 1
    assert method.keys[0].tolist() == keys[0].tolist()
    plain = MiKV(important=2, retained=2, ratio=1.0, group=2, balancer=False)
    plain.forward(query, keys, keys)
    assert plain.balance.tolist() == [[1, 1]]


# --- positions ---------------------------------------------------------------------------------------------------------


def test_sinks_are_met_as_if_the_dropped_tokens_had_never_been():
    frequencies = 10000 ** -(np.arange(DIM // 2) / (DIM // 2))
    query, keys, values = drawn(30, 1, 1)
    turn = StreamingLLM(frequencies=frequencies).rotated
    position = np.arange(30)

    def rotated(x, positions):
        return np.stack([turn(x[0, row], at) for row, at in enumerate(positions)])[None]

    method = StreamingLLM(sinks=2, window=5, frequencies=frequencies)
    found = walk(method, [rotated(query, position), rotated(keys, position), values], 20, *range(21, 31))
    for row in range(21, 30):
        held = [0, 1, *range(row - 5, row + 1)]  # everything stored, and the row itself
        inside = rotated(keys[:, held], range(8))[0] @ rotated(query[:, row : row + 1], [7])[0, 0] / math.sqrt(DIM)
        weights = np.exp(inside) / np.exp(inside).sum()
        np.testing.assert_allclose(found[0, row], weights @ values[0, held], rtol=1e-9)
    assert [method.tokens(tier)[0].tolist() for tier in (0, 1)] == [[0, 1], [*range(25, 30)]]


def test_top_logits_by_hand():
    method, parts = TopK(0.4), row_of([8, 1, 4, 2, 1])
    walk(method, parts, 4)
    output = method.forward(*[part[:, 4:] for part in parts])
    np.testing.assert_allclose(output[0, 0, 0], (8 * 0 + 4 * 2) / 12)
    assert math.isclose(method.margin, math.log(2))


# --- taking over what a cache has stored ----------------------------------------------------------------------------


def test_a_tier_is_recognised_in_any_order_and_nothing_else_is():
    method, parts = ZipCache(recompress=10), drawn(20)
    method.forward(*parts)
    keys, values = method.decoded(1)[0]
    order = np.random.default_rng(1).permutation(len(keys))
    assert method.settle(1, 0, keys[order], values[order]) == 0
    assert method.settle(1, 0, keys[order][:-1], values[order][:-1]) == math.inf
    assert method.settle(1, 0, keys[[0, *range(len(keys) - 1)]], values[[0, *range(len(keys) - 1)]]) == math.inf
    changed = values.copy()
    changed[2, 3] += 0.01
    assert method.settle(1, 0, keys, changed) == pytest.approx(0.01)


@pytest.mark.parametrize("stored", [2.0, 4.0])
def test_one_of_two_doubtful_codes_is_taken_over(stored):
    method, parts = MiKV(ratio=1.0, important=2, group=4, balancer=False), np.array([[[0, 3, 6.0, 6.0]]])
    method.forward(parts, parts, parts)
    keys, values = np.array([[0, stored, 6, 6]]), np.array([[0, 4.0, 6, 6]])
    assert method.settle(0, 0, keys, values) == 0
    assert method.keys[0].tolist() == keys.tolist()
    keys[0, 1] = 6 - stored  # settled: the other answer is wrong from now on
    assert method.settle(0, 0, keys, values) == 2
