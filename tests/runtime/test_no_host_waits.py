"""Decode steps through Triton kernels: the host launches them without waiting for the device, and steps launch the same.

No kernel runs here. Each launch is listed, and its outputs are filled with arbitrary numbers, so that the host takes the same
code path as with a GPU. Whatever would wait for the device is noticed as in test_decode_steps.
"""

import pytest
import torch
from attention_kernel import which
from cases import BY_NAME, CASES, Case
from host_waits import HostWaits, watched_layers
from launches import Launch, watch
from torch import Tensor
from toy_models import left_padded, random_model

# A case for each code path of a store; all others take long enough to be left to `make test-all`.
QUICK = [
    "full", "rtn-4", "kivi-3-short", "kivi-2-calibrated", "zipcache-16-4-2", "mikv-8-2", "h2o", "streaming_llm", "gear-60",
    "zipcache-corrected", "csr-short", "csr-tiers", "specache", "infllm-original",
]  # fmt: skip

# Attention's kernels, launched alike in all steps of a block; others run when tokens are encoded, or chosen from ever more.
ATTENTION = {"attend", "merge", "_attend"}
# Except tables as long as the longest row: RoPE's cosines and sines, and which tokens' packed copies are hidden.
LENGTHENING = {"cos", "sin", "HIDDEN", "hidden_row", "hidden_head"}


def cases() -> list[object]:
    """All cases; those that are not in QUICK are marked slow."""
    marked = [(case, () if case.name in QUICK else pytest.mark.slow) for case in CASES]
    return [pytest.param(case, id=str(case), marks=marks) for case, marks in marked]


class Steps:
    """Decode steps of a toy model, with each step's launches, and functions that would have waited in a compressed layer."""

    def __init__(self, monkeypatch, case: Case, lengths: list[int], count: int, family: str = "llama") -> None:
        monkeypatch.setenv("CALIB_KERNELS", "triton")
        found = watch(monkeypatch, runs=False)
        model, inputs = random_model(family, num_hidden_layers=1), left_padded(lengths)
        mask, token = inputs["attention_mask"], inputs["input_ids"][:, -1:]
        self.launches: list[list[Launch]] = []
        self.waits: list[set[str]] = []
        # For every table its capacity, tokens of a page, and pages of each row; and whether shapes are those of a block of steps,
        # which have room for a few pages more.
        self.shapes: list[object] = []
        with case.open(model) as cache, torch.no_grad():
            model(**inputs, past_key_values=cache)
            calls = watched_layers(monkeypatch)
            for _ in range(count):
                found.clear(), calls.clear()
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                model(token, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, past_key_values=cache)
                assert len(calls) >= 2 * len(cache.compressed)  # `update` and `attend` of each layer
                self.launches.append(list(found))
                self.waits.append(set().union(*(call.names for call in calls)))
                tables = [(t.capacity, t.page_tokens, list(map(len, t.rows))) for t in cache.sequences.all_tables]
                self.shapes.append((tables, cache.sequences.forward.of_block))
            assert cache.sequences.lengths == [length + count for length in lengths]


@pytest.mark.full
@pytest.mark.parametrize("case", cases())
def test_no_step_waits(case, monkeypatch):
    """Rows begin a block, complete one, fill a budget and evict from it in different steps; new pages are begun."""
    steps = Steps(monkeypatch, case, [60, 31, 9], 70)
    assert not set().union(*steps.waits)
    assert any(map(of_attention, steps.launches)) or which(case) is None
    for launch in (launch for step in steps.launches for launch in step):
        assert all(type(size) is int and size > 0 for size in launch.grid), launch
        numbers = {type(part) for part in launch.numbers.values()}
        assert numbers <= {int, float, bool, str, tuple, type(None)}, launch  # a tuple: the widths of a word's fields


@pytest.mark.parametrize("case", cases())
def test_steps_without_a_new_page_launch_the_same(case, monkeypatch):
    """Grids, numbers and shapes of attention's launches stay as they are."""
    check_alike(case, Steps(monkeypatch, case, [102, 70], 20))


@pytest.mark.parametrize("name", ["kivi-2-short", "zipcache-short"])
def test_also_under_a_sliding_window(name, monkeypatch):
    """The first page that is read moves on, while the number of pages read stays."""
    steps = Steps(monkeypatch, BY_NAME[name], [102, 70], 20, family="mistral-sliding")
    assert not set().union(*steps.waits)
    check_alike(BY_NAME[name], steps)


def check_alike(case: Case, steps: Steps) -> None:
    """Asserts that every step launches a kernel of attention, if one reads the case's pages, and what the step before launched, if
    neither of them added a page: a page is first read in the step after the one that added it."""
    launches = [of_attention(step) for step in steps.launches]
    assert all(map(bool, launches)) if which(case) else not any(launches)
    shapes = steps.shapes
    same = [step for step in range(2, len(launches)) if shapes[step - 2] == shapes[step - 1] == shapes[step]]
    assert len(same) >= len(launches) // 2
    for step in same:
        assert launches[step] == launches[step - 1], step


def of_attention(launches: list[Launch]) -> list[dict[str, object]]:
    """`Launch.fixed` of attention's kernels, without LENGTHENING."""
    return [
        {name: part for name, part in launch.fixed.items() if name not in LENGTHENING}
        for launch in launches
        if launch.kernel in ATTENTION
    ]


def test_the_watch_sees_what_a_launch_took_from_the_device(monkeypatch):
    """The watch itself: reading a size from a tensor is noticed as a wait, and a size that is passed as a tensor is no number."""
    found = watch(monkeypatch, "top_k", runs=False)
    from calib.kernels.top_k import triton

    scores = torch.rand(1, 2, 40)
    for size in (scores.shape[2], torch.tensor(40)):
        triton.largest[(2,)](scores, None, torch.empty(1, 2, 3), None, 80, 40, 2, size, 3, TILE=64)
    plain, taken = found
    assert "tokens" in plain.numbers and "tokens" not in taken.numbers and isinstance(taken.arguments["tokens"], Tensor)
    with HostWaits() as waits:
        triton.top_k(scores, int(scores.argmax()) % 3)
    assert waits.names
