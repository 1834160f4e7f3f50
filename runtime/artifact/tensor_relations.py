"""Checks of relations between the entries of a registered tensor, whose shape was checked before, and of a range's two tensors.

Each raises `ArtifactError`. Shares of outliers and residual bases are those of GEAR (arXiv:2403.05527), levels those of KVQuant
(arXiv:2401.18079); groups of layers, divergences and dictionaries those of CSR (arXiv:2412.11741, eq. 6-11).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.messages.printable import printable, shortened

Sizes = Mapping[str, int]

# Tolerance for rows of a residual basis or rotation: the resolution of float32 is 1e-7, that of float16 1e-3.
ORTHONORMAL = 1e-3
UNIT = 2e-3  # tolerance of an atom's norm
SYMMETRIC = 1e-6  # a few units of float32
SINGULAR = {"layers": "layer", "kv_heads": "head", "head_dim": "channel", "shares": "share", "nuq shares": "share"}
LISTED = 120  # characters of a list of numbers


def check_shares(name: str, shares: Tensor, sizes: Sizes) -> None:
    """Checks shares of outliers `[n]`: increasing, above 0 and below 1."""
    if not bool((shares > 0).all() & (shares < 1).all() & (shares.diff() > 0).all()):
        found = shortened(", ".join(f"{share:.6g}" for share in shares[:LISTED].tolist()), LISTED)
        raise ArtifactError(f"tensor {name!r} is {found}, expected increasing numbers above 0 and below 1; {FIT_AGAIN}")


def check_nuq_shares(name: str, shares: Tensor, sizes: Sizes) -> None:
    """Checks shares of outliers for non-uniform levels, `[n]`: increasing, from 0 and below 1."""
    if not bool((shares >= 0).all() & (shares < 1).all() & (shares.diff() > 0).all()):
        found = shortened(", ".join(f"{share:.6g}" for share in shares[:LISTED].tolist()), LISTED)
        raise ArtifactError(f"tensor {name!r} is {found}, expected increasing numbers from 0 and below 1; {FIT_AGAIN}")


def check_levels(name: str, levels: Tensor, sizes: Sizes) -> None:
    """Checks levels `[layers, shares, levels]`: none below the one before."""
    falling = (levels.diff(dim=-1) < 0).any(-1)
    if bool(falling.any()):
        layer, share = falling.nonzero()[0].tolist()
        raise ArtifactError(
            f"tensor {name!r} falls at layer {layer}, share {share}, expected rising levels; {FIT_AGAIN}"
        )


def check_orthonormal(name: str, basis: Tensor, sizes: Sizes) -> None:
    """Checks a residual basis or rotation `[layers, kv_heads, r, head_dim]`: rows orthonormal."""
    wide = basis.double()
    off = (wide @ wide.mT - torch.eye(basis.shape[2], dtype=wide.dtype)).abs().amax((-2, -1))
    if not bool((off <= ORTHONORMAL).all()):
        layer, head = (off > ORTHONORMAL).nonzero()[0].tolist()
        raise ArtifactError(
            f"tensor {printable(name)} is off by {off[layer, head]:.3g} at layer {layer}, head {head}, expected rows that are "
            f"orthonormal to {ORTHONORMAL:g}; {FIT_AGAIN}"
        )


def check_groups(name: str, groups: Tensor, sizes: Sizes) -> None:
    """Checks groups of layers `[layers]`: from 0, each layer in the group of the layer before or in the next."""
    # Compared and not subtracted: a difference of int64 may wrap around.
    known = (groups[1:] == groups[:-1]) | (groups[1:] == groups[:-1] + 1)
    if int(groups[0]) != 0 or not bool(known.all()):
        raise ArtifactError(
            f"tensor {name!r} is {printable(groups.tolist())}, expected groups from 0 on, each layer's the same as the layer's "
            f"before or one more; {FIT_AGAIN}"
        )


def check_divergence(name: str, divergence: Tensor, sizes: Sizes) -> None:
    """Checks divergences `[layers, layers]`: symmetric, 0 between a layer and itself."""
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


def check_dictionary(name: str, dictionary: Tensor, sizes: Sizes) -> None:
    """Checks dictionaries `[groups, atoms, channels]`: atoms as wide as a head or an equal part of it, with norm 1."""
    width, head_dim = dictionary.shape[2], sizes["head_dim"]
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


def check_falling(name: str, errors: Tensor, sizes: Sizes) -> None:
    """Checks components' errors `[layers, kv_heads, head_dim, 9]`: increasing neither with bits nor, at 0 bits, along
    components."""
    if bool((errors.diff(dim=-1) > 0).any() | (errors[..., 0].diff(dim=-1) > 0).any()):
        raise ArtifactError(
            f"tensor {name!r} increases with bits or from component to component, expected neither; {FIT_AGAIN}"
        )


def check_directions(name: str, basis: Tensor, sizes: Sizes) -> None:
    """Checks bases of components `[layers, kv_heads, head_dim, head_dim]`: no row is 0.

    Whether a head's basis can be inverted is checked when it is used (`components.py`): for a large model that takes seconds.
    """
    nothing = (basis == 0).all(-1)
    if bool(nothing.any()):
        layer, head, row = nothing.nonzero()[0].tolist()
        raise ArtifactError(
            f"tensor {name!r} is 0 in row {row} at layer {layer}, head {head}, expected rows that span the head; {FIT_AGAIN}"
        )


def check_curve(name: str, curve: Tensor, sizes: Sizes) -> None:
    """Checks predicted errors and measured losses of budgets, `[n, 2]`: neither falls."""
    if bool((curve.diff(dim=0) < 0).any()):
        raise ArtifactError(
            f"tensor {name!r} falls from one budget to the next, expected errors and losses that do not; {FIT_AGAIN}"
        )


def check_order(name: str, tensors: Mapping[str, Tensor], axes: Sequence[str]) -> None:
    """Checks that a tensor `STEM.low` is nowhere above `STEM.high`, if both are present."""
    stem = name.removesuffix(".low")
    high = tensors.get(f"{stem}.high")
    if high is None or not bool((tensors[name] > high).any()):
        return
    position = (tensors[name] > high).nonzero()[0].tolist()
    where = ", ".join(f"{SINGULAR[axis]} {index}" for axis, index in zip(axes, position, strict=True))
    raise ArtifactError(f"tensor {name!r} is above '{stem}.high' at {where}, expected a range; {FIT_AGAIN}")
