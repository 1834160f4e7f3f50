"""Matching pursuit, sums of rows by atom, and attention over sparse codes: the kernels against plain torch on the CPU."""

import pytest
import torch
from gpu.moved import moved, near
from torch.nn.functional import normalize

from benchmarks.gpu.inputs import vectors
from calib.kernels.desparsify_attend import reference as sparse_reference
from calib.kernels.desparsify_attend.operation import desparsify_attend
from calib.kernels.desparsify_attend.reference import SparsePages
from calib.kernels.matching_pursuit import reference as pursuit_reference
from calib.kernels.matching_pursuit.operation import matching_pursuit
from calib.kernels.neural_dict import reference as dictionary_reference
from calib.kernels.neural_dict.operation import scattered
from calib.kernels.pack.reference import pack_bytes
from calib.runtime.rotation import Rotation

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dim", "atoms", "sparsity"), [(128, 1000, 8), (64, 77, 4), (80, 300, 3), (32, 512, 16), (256, 64, 2)]
)
def test_matching_pursuit(device, times, dim, atoms, sparsity):
    """At least 90 % of the vectors get the same atoms (near ties may differ) and then the same coefficients; the residual's norm
    agrees to 1e-3."""
    x, table = vectors(17 * times, dim, 1, CPU), normalize(vectors(atoms, dim, 2, CPU))
    index, coefficient = moved(matching_pursuit(*moved((x, table), device), sparsity), CPU)
    expected, known = pursuit_reference.matching_pursuit(x, table, sparsity)
    same = (index == expected).all(1)
    assert float(same.double().mean()) >= 0.9
    near(coefficient[same], known[same], 1e-4)
    left = [x - pursuit_reference.desparsify(*pairs, table) for pairs in ((index, coefficient), (expected, known))]
    assert abs(float(left[0].norm() / left[1].norm()) - 1) <= 1e-3


@pytest.mark.parametrize(("dim", "count"), [(128, 500), (80, 33)])
def test_rows_added_up_by_atom(device, times, dim, count):
    rows = vectors(33 * times, dim, 1, CPU)
    index, coefficient = torch.randint(0, count, (len(rows), 8)), torch.randn(len(rows), 8)
    given = moved((coefficient, index, rows), device)
    found = scattered(*given, count)
    near(found, dictionary_reference.scattered(coefficient, index, rows, count), 1e-5)
    assert torch.equal(found, scattered(*given, count)), "the same bits every time"


@pytest.mark.parametrize("coefficients", ["float16", "float8"])
@pytest.mark.parametrize(("dim", "atoms", "sparsity", "rows"), [(128, 4000, 8, 4), (64, 300, 4, 1), (80, 100, 3, 8)])
def test_attention_over_pairs(device, times, coefficients, dim, atoms, sparsity, rows):
    draw = torch.Generator().manual_seed(1)
    pages, heads, slots = 4 * times, 2, 32
    table = torch.randperm(pages, generator=draw).view(2, -1).int()
    used = torch.tensor([table.shape[1] * slots - 3, 40], dtype=torch.int32)

    def stream():
        index = torch.randint(0, atoms, (pages, heads, slots, sparsity), generator=draw)
        kept = torch.randn(index.shape, generator=draw)
        kept = kept.half() if coefficients == "float16" else kept.to(torch.float8_e4m3fn).view(torch.uint8)
        packed = pack_bytes(index, (atoms - 1).bit_length())
        return SparsePages(packed, kept, sparsity, offline=torch.randn(atoms, dim, generator=draw).half())

    half = dim // 2
    turns = Rotation(10000.0 ** (-torch.arange(half).double() / half)).along(0, table.shape[1] * slots, CPU)
    query = torch.randn(2, heads, rows, dim, generator=draw) * 2 * dim**-0.5
    given = query, stream(), stream(), table, used, turns
    expected = sparse_reference.desparsify_attend(*given)
    found = desparsify_attend(*moved(given, device))
    top, mass, mixed = expected
    near(found.mixed / found.mass, mixed / mass[..., None], 1e-4)
    near((found.top + found.mass.log())[..., 0], top + mass.log(), 1e-4)
