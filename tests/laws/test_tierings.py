"""Laws of the tierings: every token is in one tier or the window, counts depend on a row's lengths alone, no tier shrinks."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples

from calib.runtime.stages.tiering import HeavyHitterBudget, InitialAndWindow, PromptBudget, RatioTiers, Sinks

pytestmark = pytest.mark.arithmetic

law = settings(derandomize=True, deadline=None, max_examples=examples(200))
amounts = st.one_of(st.integers(0, 90), st.floats(0, 0.5))


@st.composite
def shares(draw):
    """Draw `RatioTiers`: shares of one to four tiers that add up to 1, some of them 0; a block; perhaps a window and sinks."""
    parts = draw(st.lists(st.integers(0, 10), min_size=1, max_size=4).filter(any))
    window = draw(st.one_of(st.just(0), st.integers(1, 90)))
    sinks = draw(st.one_of(st.just(0), st.integers(1, 20)))
    return RatioTiers(tuple(part / sum(parts) for part in parts), draw(st.integers(1, 130)), window=window, sinks=sinks)


tierings = st.one_of(
    shares(),
    st.builds(HeavyHitterBudget, amounts, amounts).filter(lambda tiering: tiering.heavy or tiering.recent),
    st.builds(HeavyHitterBudget, ratio=st.floats(0.01, 1), recent=st.one_of(st.none(), st.integers(0, 40))),
    st.builds(Sinks, st.integers(0, 9), st.integers(1, 90)),
    st.builds(PromptBudget, amounts, st.integers(1, 90)),
)


@law
@given(tierings, st.integers(0, 700), st.integers(1, 500))
def test_every_token_has_one_position(tiering, length, prompt):
    held, exact = tiering.held(length, prompt), tiering.exact(length, prompt)
    assert min(held) >= 0 and exact >= 0
    if isinstance(tiering, Sinks):
        assert sum(held) == min(length, tiering.sinks + tiering.window) and exact == 0
    elif isinstance(tiering, PromptBudget):
        assert sum(held) == length - min(length, prompt) + min(length, tiering.kept(prompt)) and exact == 0
    else:
        assert sum(held) + exact == length


@law
@given(tierings, st.integers(0, 700), st.integers(1, 500))
def test_a_tier_never_shrinks(tiering, length, prompt):
    """With one more token no tier holds fewer tokens; only slots that are overwritten may change their token."""
    now, later = tiering.held(length, prompt), tiering.held(length + 1, prompt)
    assert all(one <= other for one, other in zip(now, later, strict=True))


locals_of_blocks = st.builds(InitialAndWindow, st.integers(0, 9), st.integers(1, 90), st.integers(1, 40))


@law
@given(st.one_of(tierings, locals_of_blocks), st.integers(0, 700), st.integers(1, 500))
def test_the_next_tokens_go_where_it_says(tiering, length, prompt):
    """The tier and count of `next_tokens` agree with `held` and `exact` token by token, for up to 300 tokens."""
    tier, tokens = tiering.next_tokens(length, prompt)
    assert tokens >= 0
    for more in range(1, min(tokens, 300) + 1):
        held = [count + more * (number == tier) for number, count in enumerate(tiering.held(length, prompt))]
        exact = tiering.exact(length, prompt) + more * (tier is None)
        assert tiering.held(length + more, prompt) == held[: len(tiering.held(length, prompt))]
        assert tiering.exact(length + more, prompt) == exact


@law
@given(shares(), st.integers(1, 500), st.integers(0, 400))
def test_chunks_follow_each_other(tiering, prompt, more):
    """Chunks are adjacent and depend on positions alone, so decode steps and one long forward encode the same ones. A tier's tokens
    of a chunk are its share, rounded down but for the last tier; sinks are in no tier."""
    length = prompt + more
    exact = tiering.exact(length, prompt)
    waiting = tiering.first(prompt) if not tiering.encoded(length, prompt) else tiering.block
    staying = tiering.window + tiering.sinks
    assert min(length, staying) <= exact and exact < max(prompt + 1, tiering.longest())
    assert exact < (staying if tiering.encoded(length, prompt) else tiering.window) + waiting
    chunk, total, stop = tiering.chunk_of(0, prompt), [0] * len(tiering.shares), 0
    while chunk.stop <= length - tiering.window:
        assert chunk.start == stop and all(
            tiering.chunk_of(position, prompt) == chunk for position in (chunk[0], chunk[-1])
        )
        sinks = 0 if stop else tiering.sinks
        coded = tiering.block if stop else max(prompt - tiering.window - sinks, tiering.block)
        assert len(chunk) == sinks + coded
        counts = tiering.counts(coded)
        assert sum(counts) == coded
        for share, count in list(zip(tiering.shares, counts, strict=True))[:-1]:
            wanted = max(1, math.floor(share * coded + 1e-9)) if share else 0
            assert count == wanted or sum(counts[:-1]) == coded
        total = [one + other for one, other in zip(total, counts, strict=True)]
        stop, chunk = chunk.stop, tiering.chunk_of(chunk.stop, prompt)
    assert tiering.held(length, prompt) == total and tiering.complete(length, prompt) == stop
    assert tiering.encoded(length, prompt) == sum(total) == max(0, stop - tiering.sinks)


@law
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 20), st.integers(0, 700), st.integers(1, 500))
def test_the_only_tier_gains_the_multiple_that_it_says(block, multiple_of, sinks, length, prompt):
    tiering = RatioTiers((1.0,), block, multiple_of=multiple_of, sinks=sinks)
    assert tiering.multiple == math.gcd(block, multiple_of)
    assert tiering.held(length, prompt)[0] % tiering.multiple == 0


@law
@given(tierings.filter(lambda tiering: isinstance(tiering, HeavyHitterBudget)), st.integers(1, 500))
def test_a_budget_is_fixed_by_the_prompt_and_always_has_a_token(tiering, prompt):
    heavy, recent = tiering.sizes(prompt)
    assert heavy >= 0 and recent >= 0 and heavy + recent >= 1
    assert tiering.has_ring == (recent > 0)
    assert replace(tiering, local=True).sizes(prompt) == (0, heavy + recent)
    if tiering.ratio is not None:
        assert heavy + recent == max(1, math.ceil(tiering.ratio * prompt - 1e-9))
    for length in (1, prompt, prompt + 1, 2000):
        assert tiering.held(length, prompt)[0] == min(length, heavy + recent)


@pytest.mark.parametrize(
    ("tiering", "prompt", "expected"),
    [
        (
            RatioTiers((0.6, 0.4), 10),
            25,
            {0: [0, 0], 24: [0, 0], 25: [15, 10], 34: [15, 10], 35: [21, 14], 60: [33, 22]},
        ),
        (RatioTiers((0.6, 0.4), 10), 4, {4: [0, 0], 9: [0, 0], 10: [6, 4], 20: [12, 8]}),
        (RatioTiers((0.05, 0.05, 0.9), 10), 10, {10: [1, 1, 8]}),  # a positive share is at least one token
        (RatioTiers((0.0, 1.0), 10), 10, {10: [0, 10]}),
        (RatioTiers((1.0,), 8, window=20), 50, {20: [0], 50: [30], 57: [30], 58: [38]}),
        (RatioTiers((1.0,), 8, window=20), 5, {27: [0], 28: [8], 35: [8], 36: [16]}),
        (RatioTiers((1.0,), 8, window=20, sinks=4), 50, {20: [0], 50: [26], 57: [26], 58: [34]}),
        (RatioTiers((1.0,), 8, window=20, sinks=4), 30, {31: [0], 32: [8], 39: [8], 40: [16]}),
        (RatioTiers((0.6, 0.4), 10, sinks=6), 3, {4: [0, 0], 15: [0, 0], 16: [6, 4], 25: [6, 4], 26: [12, 8]}),
        (RatioTiers((1.0,), 1, sinks=4), 1, {4: [0], 5: [1], 6: [2]}),
        (HeavyHitterBudget(ratio=0.2), 51, {5: [5, 0], 11: [11, 0], 51: [11, 40], 60: [11, 49]}),
        (HeavyHitterBudget(3, 0.5), 10, {8: [8, 0], 9: [8, 1]}),
        (PromptBudget(12, 4), 30, {0: [0], 30: [12], 31: [13], 70: [52]}),
        (PromptBudget(12, 4), 9, {9: [9], 20: [20]}),
        (PromptBudget(0.3, 4), 30, {30: [9], 40: [19]}),
        (PromptBudget(0.1, 4), 31, {31: [4], 32: [5]}),  # the newest ones stay in any case
        (PromptBudget(0.1, 4), 41, {41: [5]}),  # a share is rounded up
        (Sinks(4, 6), 3, {3: [3, 0], 9: [4, 5], 10: [4, 6], 30: [4, 6]}),
    ],
)
def test_small_examples(tiering, prompt, expected):
    assert {length: tiering.held(length, prompt) for length in expected} == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sinks": -1}, "sinks must be a whole number of tokens, at least 0, got -1; 4 is usual"),
        ({"sinks": 1.5}, "sinks must be a whole number of tokens, at least 0, got 1.5; 4 is usual"),
        (
            {"sinks": 4, "separate_prompt_tiers": True},
            "sinks=4 where all tokens of a chunk are one segment; use sinks=0",
        ),
    ],
)
def test_sinks_are_a_number_of_tokens_that_no_segment_has(wrong, message):
    with pytest.raises(ValueError, match=message):
        RatioTiers((1.0,), 8, **wrong)


def test_which_slots_are_used_again():
    for tiering, written in (
        (RatioTiers((0.5, 0.5), 9), []),
        (HeavyHitterBudget(1, 2), [0]),
        (Sinks(4, 9), [1]),
        (PromptBudget(9, 4), []),
    ):
        assert [tier for tier in range(2) if tiering.rewritten(tier)] == written
    for tiering in (HeavyHitterBudget(2, 3), Sinks(2, 3)):  # with a ring of three slots
        lengths = [tiering.held(length, 10) for length in range(30)]
        assert all(sum(later) - sum(now) in (0, 1) for now, later in pairwise(lengths))
