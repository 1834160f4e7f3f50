"""Exact tokens are met while attention over pages runs, where launches may begin early. (As compiled: test_ahead_of_time.py.)"""

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
    """One that does and does not wait would read what is not there yet."""
    options = launched(monkeypatch, early).options
    assert options["EARLY"] is early and options.get("launch_pdl", False) is early


@pytest.mark.parametrize(
    "own",
    [{"parts": ()}, {"query": QUERY.mT.contiguous().mT}, {"hidden": HIDDEN.mT.contiguous().mT}],
    ids=["no attention before it", "a copied query", "a copied mask"],
)
def test_no_launch_begins_early_behind_what_writes_its_tokens(monkeypatch, own):
    """A kernel that ran right before it may have written what it reads at once."""
    options = launched(monkeypatch, True, **own).options
    assert options["EARLY"] is False and "launch_pdl" not in options


def test_no_launch_begins_early_on_other_devices():
    assert not begins_early(torch.device("cpu"))
    assert early_launch(False) == {}
