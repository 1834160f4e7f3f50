"""Masks for attention with fetched tokens: plain torch and the interpreted kernel against loops in Python."""

import pytest
import torch
from torch import Tensor

from calib.kernels.fetched_masks import operation, reference

pytestmark = pytest.mark.arithmetic

triton = pytest.importorskip("calib.kernels.fetched_masks.triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Output buffers are filled with True, so that entries which the kernel did not write are noticed."""
    monkeypatch.setattr(triton.torch, "empty", lambda *shape, **of: torch.full(shape, True, **of))


def drawn(rows: int, heads: int, n: int, reach: int, m: int) -> tuple[Tensor, Tensor]:
    """Positions of fetched tokens, with empty entries, and of exact tokens, some of which are fetched as well."""
    draw = torch.Generator().manual_seed(n + reach)
    fetched = torch.full((rows, heads, n), -1, dtype=torch.int32)
    for own in fetched.view(-1, n):
        count = min(reach, int(torch.randint(0, n + 1, (), generator=draw)))
        own[torch.randperm(n, generator=draw)[:count]] = torch.randperm(reach, generator=draw)[:count].int()
    return fetched, torch.stack([torch.randperm(max(m, reach), generator=draw)[None, :m] for _ in range(rows)])


def by_hand(fetched: Tensor, slots: range, exact: Tensor, hidden: Tensor | None, back: Tensor | None) -> list:
    """Compute both masks with loops in Python."""
    replaced, unseen = [], []
    columns = 1 if hidden is None else hidden.shape[2]
    for row, heads in enumerate(fetched.tolist()):
        for own in heads:
            replaced.append([slot in own for slot in slots])
            for column in range(columns):
                masks = [False] * exact.shape[2] if hidden is None else hidden[row % len(hidden), 0, column].tolist()
                behind = -1 if back is None else int(back[row, 0, column, 0])
                first = [at in own or mask for at, mask in zip(exact[row, 0].tolist(), masks, strict=True)]
                unseen.append(first + [at <= behind for at in own])
    return [replaced, unseen]


def check(form, fetched: Tensor, slots: range, *others: Tensor | None) -> None:
    expected = by_hand(fetched, slots, *others)
    for mine, rows in zip(form(fetched, slots, *others), expected, strict=True):
        assert mine.dtype == torch.bool and mine.shape[:2] == fetched.shape[:2]
        assert mine.flatten(0, -2).tolist() == rows


FORMS = {"plainly": reference.fetched_masks, "by the kernel": triton.fetched_masks}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("n", [1, 7, 64, 130])
@pytest.mark.parametrize("reach", [1, 100, 2200])
def test_what_is_fetched_is_hidden_and_nothing_else(form, n, reach):
    fetched, exact = drawn(2, 3, n, reach, 35)
    check(form, fetched, range(reach), exact, None, None)
    check(form, fetched, range(reach // 3, reach + 1), exact, None, None)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("rows", [1, 2])
def test_columns_hide_more(form, rows):
    """Three query columns, with a mask of each row or of all rows, and with a sliding window."""
    fetched, exact = drawn(2, 2, 9, 30, 5)
    hidden = torch.rand(rows, 1, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    back = torch.tensor([[3, 4, 5], [-1, 20, 29]])[:, None, :, None]
    check(form, fetched, range(30), exact, hidden, None)
    check(form, fetched, range(30), exact, hidden, back)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_nothing_fetched_and_no_slots(form):
    nothing, exact = torch.empty(2, 1, 0, dtype=torch.int32), torch.tensor([[[0, 4]], [[1, 2]]])
    check(form, nothing, range(3), exact, None, None)
    fetched = torch.tensor([[[4, -1]], [[-1, -1]]], dtype=torch.int32)
    check(form, fetched, range(0), exact, None, None)


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_the_operation_runs_what_serves(forced, monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", forced)
    asked, original = [], triton.fetched_masks
    monkeypatch.setattr(triton, "fetched_masks", lambda *given: asked.append(given) or original(*given))
    fetched, exact = drawn(2, 2, 9, 30, 5)
    check(operation.fetched_masks, fetched, range(30), exact, None, None)
    assert len(asked) == (forced == "triton")
    check(operation.fetched_masks, fetched[:, :, :3], range(30), exact, None, None)
    assert len(asked) == (forced == "triton")
