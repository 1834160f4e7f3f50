"""The tensors of sparse dictionaries: which layers share one, and the dictionaries (CSR, arXiv:2412.11741, eq. 6-11).

Of a stream, L layers, G groups, N atoms of d channels each:

    {stream}.layer_groups   int64   [L]        each layer's group, from 0; the layers of a group follow one another
    {stream}.divergence     float32 [L, L]     Jensen-Shannon divergence of two layers' vectors, 0 to ln 2
    {stream}.dictionary     float16 [G, N, d]  one dictionary a group, atoms of norm 1; d divides head_dim
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from calib.runtime.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.tensor_checks import check_shape, check_values

# What follows the stream in a name, and the stage of `calib fit` that measures it.
CALIBRATORS: Mapping[str, str] = {
    "layer_groups": "layer_groups",
    "divergence": "layer_groups",
    "dictionary": "dictionaries",
}

UNIT = 2e-3  # a unit of float16 is 1e-3
SYMMETRIC = 1e-6  # and beyond ln 2: a few units of float32


def check_dictionaries(stream: str, tensors: Mapping[str, Tensor], layers: int, head_dim: int) -> None:
    """Raises `ArtifactError` where one of the stream's three tensors is not what its name promises."""
    groups, divergence, dictionary = (tensors.get(f"{stream}.{kind}") for kind in CALIBRATORS)
    if groups is not None:
        check_groups(f"{stream}.layer_groups", groups, layers)
    if divergence is not None:
        check_divergence(f"{stream}.divergence", divergence, layers)
    if dictionary is not None:
        if groups is None:
            raise ArtifactError(
                f"tensor '{stream}.dictionary' is present and '{stream}.layer_groups' is not, expected both; {FIT_AGAIN}"
            )
        check_dictionary(f"{stream}.dictionary", dictionary, int(groups[-1]) + 1, head_dim)


def check_groups(name: str, groups: Tensor, layers: int) -> None:
    """From 0, each layer in the group of the one before or in the next."""
    check_shape(name, groups, [layers], "[layers]", torch.int64)
    steps = groups.diff(prepend=groups.new_zeros(1))
    if int(groups[0]) != 0 or not bool(((steps == 0) | (steps == 1)).all()):
        raise ArtifactError(
            f"tensor {name!r} is {groups.tolist()}, expected groups from 0 on, each layer's the same as the layer's "
            f"before or one more; {FIT_AGAIN}"
        )


def check_divergence(name: str, divergence: Tensor, layers: int) -> None:
    """Symmetric, 0 between a layer and itself, 0 to ln 2."""
    check_shape(name, divergence, [layers, layers], "[layers, layers]")
    check_values(name, divergence, at_least=0, at_most=math.log(2) + SYMMETRIC)
    if bool((divergence.diagonal() != 0).any()):
        layer = int((divergence.diagonal() != 0).nonzero()[0])
        raise ArtifactError(
            f"tensor {name!r} is {divergence[layer, layer]:.6g} between layer {layer} and itself, expected 0; {FIT_AGAIN}"
        )
    apart = (divergence - divergence.T).abs() > SYMMETRIC
    if bool(apart.any()):
        first, second = apart.nonzero()[0].tolist()
        raise ArtifactError(
            f"tensor {name!r} is {divergence[first, second]:.6g} between layers {first} and {second} and "
            f"{divergence[second, first]:.6g} the other way round, expected the same; {FIT_AGAIN}"
        )


def check_dictionary(name: str, dictionary: Tensor, groups: int, head_dim: int) -> None:
    """One dictionary a group, of atoms that fit a head or an equal part of it and have norm 1."""
    atoms, width = dictionary.shape[1:] if dictionary.dim() == 3 else (0, 0)
    check_shape(name, dictionary, [groups, max(1, atoms), max(1, width)], "[groups, atoms, channels]", torch.float16)
    if head_dim % width:
        raise ArtifactError(
            f"tensor {name!r} has atoms of {width} channels, expected a divisor of head_dim {head_dim}; {FIT_AGAIN}"
        )
    off = (dictionary.float().norm(dim=-1) - 1).abs()
    if not bool((off <= UNIT).all()):
        group, atom = (off > UNIT).nonzero()[0].tolist()
        raise ArtifactError(
            f"tensor {name!r} has norm {dictionary[group, atom].float().norm():.6g} at group {group}, atom {atom}, "
            f"expected 1 to {UNIT:g}; {FIT_AGAIN}"
        )
