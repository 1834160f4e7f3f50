"""The kernel that merges parts of a softmax, interpreted, against float64: up to 200 parts, and parts without tokens."""

import pytest
import torch
from attended_by_kernel import asked
from attended_by_kernel import whole as whole_rows
from launches import watch
from paged_attention import Kind, pages_of

from calib.kernels.attend import operation, reference, triton
from calib.kernels.attend.decode_scores import NOTHING
from calib.kernels.attend.merge_kernel import merge
from calib.kernels.attend.options import merge_constants

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize("splits", [1, 2, 63, 64, 65, 128, 200])
@pytest.mark.parametrize(("rows", "channels"), [(1, 128), (3, 80), (2, 260)])
def test_parts_become_one(splits, rows, channels):
    draw = torch.Generator().manual_seed(splits)
    top = torch.randn(2, splits, rows, generator=draw) * 20
    mass = torch.rand(2, splits, rows, generator=draw) + 0.5
    mixed = torch.randn(2, splits, rows, channels, generator=draw)
    if splits > 2:
        top[:, 1::3], mass[:, 1::3], mixed[:, 1::3] = float(NOTHING.value), 0.0, 0.0  # runs without a token of the row
    found = [torch.full(shape, torch.nan) for shape in ((2, rows), (2, rows), (2, rows, channels))]
    merge[(2, rows)](top, mass, mixed, *found, *[None] * 7, splits, rows, 1, **merge_constants((channels, 0, 0, 0)))
    shares = (top.double() - top.double().amax(1, keepdim=True)).exp()
    assert torch.equal(found[0], top.amax(1))
    torch.testing.assert_close(found[1].double(), (mass * shares).sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[2].double(), (mixed * shares[..., None]).sum(1), rtol=1e-5, atol=1e-5)


def test_parts_of_nothing_stay_finite():
    top, mass, mixed = torch.full((1, 70, 1), float(NOTHING.value)), torch.zeros(1, 70, 1), torch.zeros(1, 70, 1, 32)
    found = [torch.full(shape, torch.nan) for shape in ((1, 1), (1, 1), (1, 1, 32))]
    merge[(1, 1)](top, mass, mixed, *found, *[None] * 7, 70, 1, 1, **merge_constants((32, 0, 0, 0)))
    assert found[0] == top[0, 0] and not found[1].any() and not found[2].any()


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("components", "channels", "behind"), [(48, 64, 0), (80, 128, 81), (33, 20, 5)])
def test_components_become_channels(sized, components, channels, behind):
    """The merge maps mixtures of components to channels by each head's axes (`CodeFold`). With `behind`, mixtures of the keys'
    codes follow the components, and the values that they predict are added."""
    draw, rows, splits = torch.Generator().manual_seed(components), 3, 5
    wide = components + sized + behind
    top, mass = (torch.rand(4, splits, rows, generator=draw) for _ in range(2))
    mixed = torch.randn(4, splits, rows, wide, generator=draw)
    axes = torch.randn(2, components, channels, generator=draw).half()
    size = torch.rand(2, 1, 1, generator=draw)
    origin, mean = (torch.randn(2, 1, channels, generator=draw) for _ in range(2))
    table = torch.randint(-(2**15), 2**15, (2, max(0, behind - 1), channels), generator=draw).to(torch.int16)
    unit, largest = torch.rand(2, 1, channels, generator=draw) / 2**15, torch.rand(table.shape[1], generator=draw) * 9
    found, expected = (
        [torch.full(shape, torch.nan) for shape in ((4, rows), (4, rows), (4, rows, last))] for last in (channels, wide)
    )
    columns = [components, int(sized), 0, behind]
    merge[(4, rows)](
        top,
        mass,
        mixed,
        *found,
        axes,
        size,
        origin,
        mean if sized else None,
        *((table, unit, largest) if behind else [None] * 3),
        splits,
        rows,
        2,
        **merge_constants(tuple(columns), channels),
    )
    merge[(4, rows)](top, mass, mixed, *expected, *[None] * 7, splits, rows, 2, **merge_constants(tuple(columns)))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    own, sums, kept = expected[2].double().unflatten(0, (2, 2)).split([components, int(sized), behind], -1)
    masses = expected[1].double().view(2, 2, rows, 1)
    offset = mean * masses + (origin - mean) * sums if sized else origin * masses
    wanted = (own @ axes.double()) * size + offset
    if behind:
        wanted = wanted + (2 * kept[..., :-1] - largest * kept[..., -1:]) @ table.double() * unit
    torch.testing.assert_close(found[2].double(), wanted.flatten(0, 1), rtol=1e-5, atol=3e-5)


@pytest.mark.full
def test_runs_wait_to_be_joined(monkeypatch):
    """With `runs` no merge is launched if mixtures are of channels already; merged by plain torch, the runs give the same part."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr(triton, "_programs", lambda device: 16)
    keys, values = (pages_of(Kind(4, "token"), (4, 2, 64, 32), seed) for seed in range(2))
    query, span = asked(keys, rows=2, query_rows=3), whole_rows(keys, [2, 1, 3], [0, 2, 1], used=[190, 60])
    launched = watch(monkeypatch, "attend")
    found, joined = (
        operation.attend_pages(query, keys.stream, values.stream, span, runs=runs) for runs in (True, False)
    )
    assert [launch.kernel for launch in launched] == ["attend", "attend", "merge"]
    assert found.runs > 1 == joined.runs
    part = reference.whole(found)
    assert reference.whole(joined) is joined and torch.equal(part.top, joined.top)
    for name in ("mass", "mixed"):
        torch.testing.assert_close(getattr(part, name), getattr(joined, name), rtol=1e-5, atol=1e-5)
