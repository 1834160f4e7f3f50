"""Times a training step of NeuralDict against the same step in plain autograd (on a CPU: `benchmarks/neural_dict_cpu.py`)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.autograd_step import AGREE, AutogradStep, ours
from benchmarks.gpu.agreement import Disagrees
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.inputs import vectors
from benchmarks.gpu.launches import supported
from benchmarks.gpu.turns import in_turns


def training_step(bench: Bench) -> Measured:
    """Returns the figure "speedup": autograd's time over ours."""
    bench.needs_kernel("matching_pursuit")
    size = bench.sizes
    width = min(size.head_dim, size.step_atoms)
    atoms = normalize(vectors(size.step_atoms, width, 3, bench.device))
    plain, first = AutogradStep(atoms, size.sparsity), ours(atoms, size.sparsity)
    again = ours(atoms, size.sparsity)
    sets = [vectors(size.step_vectors, width, 4 + seed, bench.device) for seed in range(size.sets)]
    expected = plain.step(sets[0])
    with supported(bench, "matching_pursuit") as launched:
        first.train_batch(sets[0])
    apart = float(((first.last_losses - expected) / expected).abs().max())
    if not apart <= AGREE:
        raise Disagrees(f"the losses are {apart:.2g} away from autograd's (at most {AGREE:.2g}): no speed is given")

    def every(step: Callable[[Tensor], object]) -> None:
        for x in sets:
            step(x)

    calls: dict[str, Callable[[], object]] = {
        "ours": partial(every, first.train_batch),
        "ours again": partial(every, again.train_batch),
        "autograd": partial(every, plain.step),
    }
    timed = in_turns(bench, calls, {"speedup": ("autograd", "ours"), "A/A": ("ours again", "ours")})
    details: dict[str, object] = {
        "vectors": size.step_vectors,
        "atoms": size.step_atoms,
        "channels": width,
        "sparsity": size.sparsity,
    }
    details |= {"baseline": "autograd through the pursuit, float32", "losses_apart": apart}
    return Measured({"speedup": timed["ratios"]["speedup"]}, {**details, "kernels_launched": sorted(launched), **timed})
