"""The bits of `klt`'s components: budgets are met exactly, and errors are close to the least, found by an exhaustive search."""

from itertools import product

import pytest
import torch
from toy_artifact import toy_components

from calib.runtime.artifact.component_bits import Allocator, Words, patterns

pytestmark = pytest.mark.arithmetic
SHAPE = (2, 2, 16)


def errors_of(shape=SHAPE, seed=0):
    tensors = toy_components(shape, torch.Generator().manual_seed(seed))
    return {"keys": tensors["keys.klt.errors"], "values": 0.3 * tensors["values.klt.errors"]}


def error_of(errors, allocation):
    """The predicted error from its formula: of a head's W words component p W + w has the width of field p."""
    total = 0.0
    for role, streams in allocation.streams.items():
        for layer, words in enumerate(streams):
            for head, own in enumerate(errors[role][layer]):
                bits = (words.bits_of(head) + [0] * len(own))[: len(own)]
                total += sum(float(row[width]) for row, width in zip(own, bits, strict=True))
    return total


def words_of(allocation):
    return sum(sum(words.counts) for streams in allocation.streams.values() for words in streams)


def test_patterns_share_a_word_out():
    found = patterns()
    assert len(set(found)) == len(found) and (6, 4, 3, 2, 1) in found and (8, 8) in found and (1,) * 16 in found
    for widths in found:
        assert sum(widths) == 16 and list(widths) == sorted(widths, reverse=True) and widths[0] <= 8


@pytest.mark.parametrize("bits", [0.5, 1, 2.25, 4, 8])
def test_the_whole_budget_is_spent_and_no_more(bits):
    errors = errors_of()
    allocation = Allocator(errors).at_bits(bits)
    values = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    assert words_of(allocation) * 16 / values == allocation.bits == bits
    assert allocation.error == pytest.approx(error_of(errors, allocation), rel=1e-5)


def test_no_other_choice_of_words_is_better():
    """One layer with two heads: every pattern and every number of words for each stream."""
    errors = errors_of((1, 2, 4), seed=3)
    solver, best = Allocator(errors), {}
    for role in ("keys", "values"):
        for widths, counts in product(patterns(), product(range(3), repeat=2)):
            if any(counts):
                one = type("", (), {"streams": {role: (Words(widths, counts),)}})
                key = role, sum(counts)
                best[key] = min(best.get(key, torch.inf), error_of(errors, one))
    for words in range(2, 9):
        least = min(best["keys", k] + best["values", words - k] for k in range(1, words) if words - k <= 4 and k <= 4)
        found = solver.at_bits(words)  # 16 values: a word of 16 bits is one bit per value
        assert words_of(found) == words
        # A price per word reaches only choices on the curve's lower convex hull: with few words the error may be a little larger.
        assert least * (1 - 1e-6) <= found.error <= least * 1.15, words


def test_bits_go_where_errors_cost_most():
    errors = errors_of()
    errors["keys"][0, 0] *= 100
    streams = Allocator(errors).at_bits(2.0).streams
    counts = [count for words in streams["keys"] for count in words.counts]
    assert counts[0] == max(counts) > counts[1]


def test_an_error_is_bought_with_few_bits():
    errors = errors_of((3, 2, 16))
    solver = Allocator(errors)
    for bits in (0.75, 1.5, 3.0):
        wanted = solver.at_bits(bits).error
        found = solver.at_error(wanted)
        assert found.error <= wanted * (1 + 1e-6) and found.bits <= bits * 1.1


def test_every_stream_has_a_word():
    errors = errors_of()
    errors["values"] = errors["values"] * 1e-9
    least = Allocator(errors).at_bits(0.5)
    assert all(sum(words.counts) for streams in least.streams.values() for words in streams)


@pytest.mark.parametrize("bits", [0, 0.1, 8.5, "2", None, True, float("nan")])
def test_a_budget_out_of_reach_is_refused(bits):
    with pytest.raises(ValueError, match=r"bits must be a number from 1 \(a word a layer\) to 8, got"):
        Allocator(errors_of((2, 1, 16))).at_bits(bits)


def test_an_error_out_of_reach_is_refused():
    with pytest.raises(ValueError, match="no budget up to 8 bits has an error as small as 0"):
        Allocator(errors_of()).at_error(0.0)
