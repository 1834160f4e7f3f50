"""Launch options of the kernel of exact tokens: where possible it begins while attention over pages still runs. (For the compiled
instructions see test_ahead_of_time.py.)"""

import pytest
import torch

from calib.kernels.attend import exact_triton
from calib.kernels.attend.packed_pages import Attended, ExactGroup, ExactTokens
from calib.kernels.early_launch import begins_early, early_launch
from calib.kernels.launch import Launch, LaunchedBy

PART = Attended(torch.zeros(1, 2, 2, 1), torch.ones(1, 2, 2, 1), torch.zeros(1, 2, 2, 16))
QUERY = torch.zeros(1, 2, 2, 16)
HIDDEN = torch.zeros(1, 1, 2, 2, dtype=torch.bool)


def launched(monkeypatch, early: bool, query=QUERY, hidden=HIDDEN, parts=(PART,)) -> Launch:
    """The launch of two exact tokens, beside one part by default."""
    found: list[Launch] = []
    monkeypatch.setattr(exact_triton, "begins_early", lambda device: early)
    tokens = torch.zeros(1, 2, 2, 16)
    with LaunchedBy(found.append):
        exact_triton.attend_exact(query, ExactTokens((ExactGroup(tokens, tokens),), hidden), parts, None)
    return found[0]


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_begins_early_where_it_waits(monkeypatch, early):
    """The constant EARLY, with which the kernel waits, and the launch option `launch_pdl` are only set together. A kernel that
    began early and did not wait would read unfinished parts."""
    options = launched(monkeypatch, early).options
    assert options["EARLY"] is early and options.get("launch_pdl", False) is early


@pytest.mark.parametrize(
    "own",
    [{"parts": ()}, {"query": QUERY.mT.contiguous().mT}, {"hidden": HIDDEN.mT.contiguous().mT}],
    ids=["no attention before it", "a copied query", "a copied mask"],
)
def test_no_launch_begins_early_behind_what_writes_its_tokens(monkeypatch, own):
    """A kernel that is launched right before this one may write what this one reads before it waits."""
    options = launched(monkeypatch, True, **own).options
    assert options["EARLY"] is False and "launch_pdl" not in options


def test_no_launch_begins_early_on_other_devices():
    assert not begins_early(torch.device("cpu"))
    assert early_launch(False) == {}
