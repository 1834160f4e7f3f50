"""Laws of the schedules: an encoded token stays encoded, and the window always has a slot for every exact token."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples

from calib.runtime.stages.schedule import Blocks, SlidingResidual

pytestmark = pytest.mark.arithmetic

schedules = st.one_of(st.integers(1, 300).map(Blocks), st.integers(0, 300).map(SlidingResidual))
law = settings(derandomize=True, deadline=None, max_examples=examples(200))


@law
@given(schedules, st.integers(0, 2000))
def test_what_is_encoded_never_comes_back(schedule, length):
    packed, later = schedule.packed(length), schedule.packed(length + 1)
    assert 0 <= packed <= length
    assert packed <= later <= length + 1
    # Codes may be written before attention reads them (`encoded` >= `packed`), and only of tokens that exist.
    assert packed <= schedule.encoded(length) <= length
    assert schedule.encoded(length) <= schedule.encoded(length + 1)


@law
@given(schedules, st.integers(0, 2000))
def test_the_exact_tokens_fit_the_window_and_its_slots(schedule, length):
    exact = range(schedule.packed(length), length)
    assert len(exact) <= schedule.window()
    size = max(1, schedule.window())
    slots = {token % size for token in exact}
    assert len(slots) == len(exact)  # no two tokens in one slot
    assert all(slot < schedule.slots(length) for slot in slots)
    assert schedule.slots(length) <= schedule.window()


@law
@given(schedules, st.integers(0, 2000), st.integers(0, 300))
def test_steps_and_one_jump_encode_the_same(schedule, length, count):
    stepped = [schedule.packed(length + step) for step in range(count + 1)]
    assert stepped == sorted(stepped)
    # All decode steps that pack tokens pack the same number of them: one, or a whole block.
    to_device = {after - before for before, after in pairwise(stepped)} - {0}
    assert len(to_device) <= 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Blocks(4), [0, 0, 0, 0, 4, 4, 4, 4, 8]),
        (SlidingResidual(3), [0, 0, 0, 0, 1, 2, 3, 4, 5]),
        (SlidingResidual(0), list(range(9))),
        (Blocks(1), list(range(9))),
    ],
)
def test_small_examples(schedule, expected):
    assert [schedule.packed(length) for length in range(9)] == expected


@pytest.mark.parametrize(
    ("residual", "expected"),
    [
        (128, [0, 0, 128, 128, 256]),
        (100, [0, 64, 128, 192, 256]),
        (40, [32, 96, 128, 192, 288]),
        (31, [1, 69, 97, 169, 269]),
    ],
)
def test_the_tokens_of_a_residual_are_encoded_in_whole_blocks(residual, expected):
    assert [SlidingResidual(residual).encoded(length) for length in (32, 100, 128, 200, 300)] == expected


@pytest.mark.parametrize("size", [0, -1, 1.5, "32", True, None])
def test_blocks_refuse_what_is_no_positive_number_of_tokens(size):
    with pytest.raises(ValueError, match=r"at least 1.*got"):
        Blocks(size)


@pytest.mark.parametrize("size", [-1, 1.5, "32", True, None])
def test_residuals_refuse_what_is_no_number_of_tokens(size):
    with pytest.raises(ValueError, match=r"residual.*got"):
        SlidingResidual(size)
