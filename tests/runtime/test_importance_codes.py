"""The float64 oracle of the importance methods itself: hashes, counts and codes by hand, and full attention if all is kept."""

import math

import numpy as np
import oracle
import pytest
import torch
from importance.coding import channel_scale, never_zero, per_channel, per_token
from importance.draws import count, counter_hash, fmix32
from importance.oracles import ORACLES
from importance.toy_rows import DIM, drawn, walk

pytestmark = pytest.mark.arithmetic

# --- hashes and counts ----------------------------------------------------------------------------------------------


def test_the_finaliser_is_that_of_murmurhash3():
    assert fmix32(0) == 0
    assert fmix32(1) == 0x514E28B7  # the published hash of the empty string under seed 1
    assert len({fmix32(x) for x in range(5000)}) == 5000  # a bijection


def test_the_counter_hash_mixes_five_words():
    h = fmix32(7)
    for word in (2, 3, 5, 11):
        h = fmix32((h * 5 + 0xE6546B64) % 2**32 ^ word)
    assert counter_hash(2 * 2**32 + 7, 3, 5, 11) == h


def test_every_word_moves_the_counter_hash():
    base = (7, 1, 2, 3)
    others = [(8, 1, 2, 3), (7 + 2**32, 1, 2, 3), (7, 2, 2, 3), (7, 1, 3, 3), (7, 1, 2, 4), (7, 2, 1, 3)]
    assert len({counter_hash(*words) for words in (base, *others)}) == 7
    draws = np.array([counter_hash(0, 0, 0, position) for position in range(20000)]) / 2**32
    assert abs(draws.mean() - 0.5) < 0.01 and abs((draws < 0.05).mean() - 0.05) < 0.005


def test_counts_are_rounded_down_and_at_least_one():
    assert [count(share, 100) for share in (0.6, 0.07, 0.29, 0.005, 0.0)] == [60, 7, 29, 1, 0]
    assert count(0.5, 5) == 2 and count(1.0, 7) == 7


# --- codes ----------------------------------------------------------------------------------------------------------


def test_codes_by_hand():
    x = np.array([[0, 1.5, 2, 6.0]])  # s = 2, z = 0
    assert per_token(x, 2, 4, 1.0)[0].tolist() == [[0, 2, 2, 6]]
    assert per_token(np.array([[0, 1, 3, 6.0]]), 2, 4, 1.0)[0].tolist() == [[0, 2, 4, 6]]  # ties go up
    pairs = np.array([[0, 1.5, 2, 8.0]])
    assert per_token(pairs, 2, 2, 1.0)[0].tolist() == pairs.tolist()  # each pair has a range of its own
    # Half the range: 3 +- 1.5, in steps of 1; what lies outside is clamped.
    assert per_token(x, 2, 4, 0.5)[0].tolist() == [[1.5, 1.5, 2.5, 4.5]]
    assert per_token(np.array([[3.0, 3.0]]), 4, 2, 1.0)[0].tolist() == [[3, 3]]


def test_parameters_are_stored_in_sixteen_bits_before_codes_are_chosen():
    x = np.array([[0.1, 0.2, 0.7, 1.3]])
    scale, zero = (float(np.float16(value)) for value in (1.2 / 15, 0.1))
    assert scale != 1.2 / 15 and zero != 0.1
    codes = np.floor((x - zero) / scale + 0.5)
    np.testing.assert_allclose(per_token(x, 4, 4, 1.0)[0], np.clip(codes, 0, 15) * scale + zero, rtol=1e-12)


def test_a_doubtful_code_has_both_answers():
    x = np.array([[0.0, 3.0, 5.0 * (1 + 1e-9), 6.0]])  # two values on borders, up to rounding
    choices = per_token(x, 2, 4, 1.0)
    assert choices[0].tolist() == [[0, 4, 6, 6]]
    assert [{round(float(value), 3) for value in choices[:, 0, column]} for column in (1, 2, 3)] == [
        {2, 4},
        {4, 6},
        {6},
    ]


def test_a_channel_keeps_the_range_it_was_measured_with():
    table = [np.array([1.0, 0.0])], [np.array([3.0, 1.5])]
    x = np.array([[-2, -9], [1.1, 0.4], [7, 0.6]])
    assert per_channel(x, 2, table, 1.0)[0].tolist() == [[-2, -1.5], [2, 0.5], [4, 0.5]]


def test_channel_separable_scales():
    x = np.array([[4.0, 0, -0.25], [-9, 0, 0.04]])
    assert [scale.tolist() for scale in channel_scale(x)] == 2 * [[3, 0, 0.5]]
    assert never_zero(channel_scale(x)[0]).tolist() == [3, 0.5, 0.5] and never_zero(np.zeros(2)).tolist() == [1, 1]
    third = channel_scale(x / 3)[0]
    assert np.array_equal(third, np.float16(third)) and abs(third[0] - math.sqrt(3)) < 2**-10


# --- everything kept is full attention ------------------------------------------------------------------------------

KEEP_ALL = {
    "zipcache": {"tiers": [[16, 1.0]], "recompress": 8},
    "mikv": {"budget": 100},
    "h2o": {"heavy": 50, "recent": 50},
    "tova": {"budget": 100},
    "snapkv": {"budget": 100},
    "streaming_llm": {"window": 100},
    "oracle": {"ratio": 1.0},
}


@pytest.mark.parametrize("cuts", [(30, 31, 32, 45), (1, 2, 20, 45), (45,)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("method", ORACLES)
def test_a_method_that_keeps_everything_is_full_attention(method, heads, kv_heads, cuts):
    parts = drawn(45, heads, kv_heads)
    found = walk(ORACLES[method](**KEEP_ALL[method]), parts, *cuts)
    expected = oracle.attention(*map(torch.tensor, parts), DIM**-0.5)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-10, atol=1e-12)


def test_a_low_tier_is_not_full_attention():
    parts = drawn(45)
    expected = oracle.attention(*map(torch.tensor, parts), DIM**-0.5).numpy()
    for name, options in {
        "zipcache": {"recompress": 8},
        "mikv": {},
        "h2o": {},
        "streaming_llm": {},
        "oracle": {},
    }.items():
        if name == "streaming_llm":
            options = {"window": 8, "positions": "original"}
        found = walk(ORACLES[name](**options), parts, 30, *range(31, 46))
        np.testing.assert_allclose(found[:, :30], expected[:, :30], rtol=1e-10, atol=1e-12)
        assert abs(found[:, 31:] - expected[:, 31:]).max() > 1e-3, name
