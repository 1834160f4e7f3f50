"""Times matching pursuit of a prompt's vectors against the same pursuit in plain torch, in float32 and in bfloat16."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.agreement import Disagrees
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.inputs import vectors
from benchmarks.gpu.launches import supported
from benchmarks.gpu.operations import matching_pursuit
from benchmarks.gpu.turns import in_turns, milliseconds
from calib.kernels.matching_pursuit.reference import desparsify, pursuit_by_gram, pursuit_by_products

CLOSE = 1e-3  # largest relative difference of mean errors, which near ties may cause


@torch.no_grad()
def pursuit(bench: Bench) -> Measured:
    """Returns the figures "float32" (the fastest form in plain torch) and "bfloat16": their time over ours."""
    bench.needs_kernel("matching_pursuit")
    size = bench.sizes
    sets = [vectors(size.vectors, size.head_dim, seed, bench.device) for seed in range(1, 1 + size.sets)]
    atoms = torch.nn.functional.normalize(vectors(size.pursuit_atoms, size.head_dim, 99, bench.device))
    with supported(bench, "matching_pursuit") as launched:
        found = matching_pursuit(sets[0], atoms, size.sparsity)
    both = found, pursuit_by_products(sets[0], atoms, size.sparsity)
    errors = [left(sets[0], index, coefficient, atoms) for index, coefficient in both]
    if not abs(errors[0] / errors[1] - 1) <= CLOSE:
        raise Disagrees(f"mean relative error {errors[0]:.6f}, the reference's {errors[1]:.6f}: no speed is given")
    forms = {"by products": pursuit_by_products, "by Gram": pursuit_by_gram}
    known = {name: milliseconds(bench, partial(form, sets[0], atoms, size.sparsity)) for name, form in forms.items()}
    fastest = min(known, key=known.__getitem__)

    def every(way: Callable[[Tensor, Tensor, int], object], *, given: list[Tensor], over: Tensor) -> None:
        for x in given:
            way(x, over, size.sparsity)

    halves = [x.bfloat16() for x in sets]
    calls: dict[str, Callable[[], object]] = {
        "ours": partial(every, matching_pursuit, given=sets, over=atoms),
        "ours again": partial(every, matching_pursuit, given=sets, over=atoms),
        "float32": partial(every, forms[fastest], given=sets, over=atoms),
        "bfloat16": partial(every, in_its_own_dtype, given=halves, over=atoms.bfloat16()),
    }
    pairs = {"float32": ("float32", "ours"), "bfloat16": ("bfloat16", "ours"), "A/A": ("ours again", "ours")}
    timed = in_turns(bench, calls, pairs)
    details = {
        "vectors": size.vectors,
        "atoms": size.pursuit_atoms,
        "sparsity": size.sparsity,
        "channels": size.head_dim,
        "baseline": fastest,
        "mean_relative_errors": errors,
        "kernels_launched": sorted(launched),
    }
    return Measured({name: timed["ratios"][name] for name in ("float32", "bfloat16")}, {**details, **timed})


def in_its_own_dtype(x: Tensor, atoms: Tensor, sparsity: int) -> tuple[Tensor, Tensor]:
    """Runs matching pursuit with one product, one argmax and one subtraction per step, all in the dtype of `x`."""
    residual, index, coefficient = x.clone(), [], []
    for _ in range(sparsity):
        correlations = residual @ atoms.mT
        position = correlations.abs().argmax(1, keepdim=True)
        part = correlations.gather(1, position)
        residual -= part * atoms[position[:, 0]]
        index.append(position)
        coefficient.append(part)
    return torch.cat(index, 1), torch.cat(coefficient, 1)


def left(x: Tensor, index: Tensor, coefficient: Tensor, atoms: Tensor) -> float:
    """Returns the mean of |x - x^|^2 / |x|^2."""
    apart = (x - desparsify(index, coefficient, atoms)).square().sum(1)
    return float((apart / x.square().sum(1)).mean())
