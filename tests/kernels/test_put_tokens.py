"""New tokens are stored in their slots: plain torch and the interpreted kernel against loops, bit for bit."""

import pytest
import torch
from launches import watch

from calib.kernels.put_tokens import operation, reference
from calib.kernels.put_tokens.operation import Put, put_tokens

pytestmark = pytest.mark.arithmetic

PAGES, ROWS, SLOTS = 5, 4, 7


def drawn(shape, dtype, seed):
    """Random integers in any dtype."""
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def puts(by, seed=0):
    """One `Put` for each kind of slots in `by`, with tensors of different dtypes, heads and widths that are slices of larger
    ones."""
    kinds = {
        "one for all": ((), {}),
        "rows": ((3,), {"rows": torch.tensor([3, 0, 2])}),
        "pages": ((ROWS,), {"pages": torch.tensor([4, 0, 1, 2])}),
        "rows and pages": ((2,), {"rows": torch.tensor([3, 1]), "pages": torch.tensor([0, 4])}),
        "heads": ((ROWS, 3), {"pages": torch.arange(ROWS * 3).view(ROWS, 3) % PAGES}),
        "several": ((), {"rows": torch.tensor([2, 0])}),
        "several in pages": ((), {"pages": torch.tensor([4, 0, 1, 2])}),
        "several at slots": ((), {"pages": torch.tensor([4, 0, 1]), "rows": torch.tensor([2, 0, 3])}),
    }
    found = []
    for i, name in enumerate(by):
        shape, own = kinds[name]
        heads, width, dtype = (3, 33, torch.bfloat16) if i % 2 == 0 else (3 if name == "heads" else 1, 8, torch.int16)
        pages = ROWS if name in ("one for all", "rows", "several") else PAGES
        if name.startswith("several"):  # three tokens in consecutive slots
            into = drawn((pages, heads, 2 * SLOTS, width), dtype, 10 * seed + i)[:, :, 3 : 3 + SLOTS]
            tokens = drawn((ROWS, heads, SLOTS, width), dtype, 20 * seed + i)[:, :, 2:5]
            found.append(Put(into, tokens, torch.tensor([4, 0, 3]) if name == "several at slots" else 4, **own))
            continue
        slots = 5 if name == "one for all" else drawn(shape, torch.int64, seed + i) % SLOTS
        into = drawn((pages, SLOTS, heads, width + 2), dtype, 10 * seed + i).transpose(1, 2)[..., 1 : 1 + width]
        tokens = drawn((ROWS, 2, heads, width), dtype, 20 * seed + i).transpose(1, 2)[:, :, 1:]
        found.append(Put(into, tokens, slots, **own))
    return found


def by_loops(one):
    """Compute the updated tensor with loops."""
    found, rows = one.into.clone(), range(len(one.tokens)) if one.rows is None else one.rows.tolist()
    for i, row in enumerate(rows):
        for head in range(one.into.shape[1]):
            page, slot = (
                row if part is None else part if isinstance(part, int) else part[i].expand(one.into.shape[1])[head]
                for part in (one.pages, one.slots)
            )
            for number, token in enumerate(one.tokens[row, head]):
                found[int(page), head, int(slot) + number] = token
    return found


@pytest.mark.parametrize(
    "by",
    [
        ["one for all"],
        ["rows", "rows"],
        ["pages", "pages", "pages"],
        ["rows and pages", "heads", "heads", "one for all"],
        ["heads", "rows", "pages", "rows and pages", "one for all"],
        ["heads", "rows", "pages", "rows and pages", "one for all", "rows", "pages"],
        ["several", "several in pages", "rows", "several in pages", "several", "one for all"],
        ["several at slots", "several at slots", "rows"],
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["reference", "triton"])
def test_tokens_are_where_they_belong(by, form, monkeypatch):
    """The whole tensors are compared, so nothing else has changed. A launch stores into up to six tensors."""
    monkeypatch.setenv("CALIB_KERNELS", form)
    asked = puts(by)
    launched, expected = watch(monkeypatch, "put_tokens"), [by_loops(one) for one in asked]
    put_tokens(asked)
    assert all(torch.equal(one.into, other) for one, other in zip(asked, expected, strict=True))
    assert len(launched) == (0 if form == "reference" else -(-len(by) // 6))


def test_what_the_kernel_does_not_serve_is_put_plainly(monkeypatch):
    """A tensor whose last axis is not contiguous is updated by plain torch, the other one by the kernel."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    served, other = puts(["rows", "pages"])
    apart = Put(torch.zeros(PAGES, 1, 8, SLOTS, dtype=torch.int16).mT, other.tokens, other.slots, pages=other.pages)
    expected, launched = [by_loops(one) for one in (served, apart)], watch(monkeypatch, "put_tokens")
    put_tokens([served, apart])
    assert torch.equal(served.into, expected[0]) and torch.equal(apart.into, expected[1])
    (launch,) = launched
    assert launch.arguments["INTO_0"] is served.into and launch.arguments["INTO_1"] is None


def test_nothing_to_put(monkeypatch):
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    none = torch.zeros(0, dtype=torch.int64)
    for form in (operation, reference):
        form.put_tokens([])
        form.put_tokens([Put(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 1, 8), none, none)])
