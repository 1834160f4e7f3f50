"""Groups of adjacent layers that share a dictionary (CSR, arXiv:2412.11741, eq. 6 and 7)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from calib.errors import UsageError

# The first layers of the groups that the paper gives for its models of 32 layers, "adjusted" by hand (appendix, "Merged Layers").
PAPER_LAYERS = 32
PAPER_STARTS = {"keys": (0, 1, 2, 3, 6, 10, 14, 18, 22, 26, 30), "values": (0, 1, 2, 8, 14, 20, 26)}


def layer_groups(
    kind: str, stream: str, divergence: Tensor, reached: Sequence[int], delta1: float = 0.2, delta2: float = 1.0
) -> Tensor:
    """Returns the group of each layer: int64 `[layers]`, numbered from 0 in layer order; a group is a run of adjacent layers.

    A layer that is not among `reached` gets the group of the layer before it and does not separate groups: the layers on
    both sides of it count as adjacent.

    Args:
        kind: `measured`: a layer joins the group before it while every pair of the group has a divergence of at most
            `delta1` (eq. 6) and the divergences of adjacent layers sum to at most `delta2` (eq. 7). `layers`: each layer is a
            group. `paper-32`: the groups that the paper prints.
        stream: `keys` or `values`.
        divergence: of each pair of layers, `[layers, layers]`.
        reached: layers that have vectors, in order.
        delta1: largest divergence of two layers of a `measured` group, in nats.
        delta2: largest sum of the divergences of adjacent layers of a `measured` group, in nats.

    Raises UsageError for `paper-32` if the model does not have 32 layers.
    """
    if kind == "paper-32":
        check_paper(len(divergence))
        starts = set(PAPER_STARTS[stream])
    elif kind == "layers":
        starts = set(reached)
    else:
        starts = measured_starts(divergence, reached, delta1, delta2)
    numbers: list[int] = []
    before = None
    for layer in range(len(divergence)):
        begun = sum(start <= layer for start in starts)
        if layer in reached and begun != before:
            numbers.append(numbers[-1] + 1 if before is not None else 0)
            before = begun
        else:
            numbers.append(numbers[-1] if numbers else 0)
    return torch.tensor(numbers)


def measured_starts(divergence: Tensor, reached: Sequence[int], delta1: float, delta2: float) -> set[int]:
    """Returns the first layer of each group, by eq. 6 and 7."""
    starts: set[int] = set()
    group: list[int] = []
    total = 0.0
    for layer in reached:
        total += float(divergence[group[-1], layer]) if group else 0.0
        if not group or total > delta2 or bool((divergence[group, layer] > delta1).any()):
            starts.add(layer)
            group, total = [], 0.0
        group.append(layer)
    return starts


def check_paper(layers: int) -> None:
    """Raises UsageError unless `layers` is the 32 of the paper's models."""
    if layers != PAPER_LAYERS:
        raise UsageError(
            f"model.dictionary.groups='paper-32' is for models of {PAPER_LAYERS} layers, this one has {layers}: "
            "use 'measured' or 'layers'"
        )


def members(groups: Tensor, reached: Sequence[int]) -> list[list[int]]:
    """Returns the layers of each group that have vectors."""
    return [[layer for layer in reached if int(groups[layer]) == group] for group in range(int(groups.max()) + 1)]


def in_words(layers: Sequence[int]) -> str:
    """Returns increasing layer numbers as text, runs shortened: `3`, `3-5` or `3, 5-7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
