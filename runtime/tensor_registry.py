"""The tensors an artifact is known to hold: names, shapes, allowed values, and who measures them.

L layers, H KV heads, D head_dim; float32 but for those of dictionaries, which are in `dictionary_tensors.py`; those of
transforms are in `transform_tensors.py`.
`docs/artifact_format.md` says the same in prose. Names that are not here may be present: they come from calibrators this
version does not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, float32

from calib.runtime.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.dictionary_tensors import CALIBRATORS, check_dictionaries
from calib.runtime.tensor_checks import check_shape, check_values
from calib.runtime.transform_tensors import CALIBRATORS as TRANSFORM_CALIBRATORS
from calib.runtime.transform_tensors import check_transforms

STREAMS = ("keys", "values")


@dataclass(frozen=True)
class PerChannel:
    """One registered [L, H, D] tensor: the calibrator that measures it and the values it may take."""

    calibrator: str
    above: float | None = None  # every entry is greater than this
    at_least: float | None = None


PER_CHANNEL: Mapping[str, PerChannel] = {
    "keys.low": PerChannel("channel_range"),  # least key of the channel after RoPE
    "keys.high": PerChannel("channel_range"),
    "values.low": PerChannel("channel_range"),
    "values.high": PerChannel("channel_range"),
    "values.scale": PerChannel("channel_scale", above=0),  # sqrt(max_t |v|), ZipCache (arXiv:2405.14256) eq. 6
    "keys.balancer": PerChannel("balancer", above=0),  # sqrt(max_t |q| / max_t |k|), MiKV (arXiv:2402.18096) eq. 2-4
    "queries.mean_square": PerChannel("query_energy", at_least=0),  # mean of q^2 over tokens and query heads
}

# Shares of outliers, both ends together: the last axis of every threshold (GEAR, arXiv:2403.05527, eq. 4).
SHARES = "outliers.shares"

# Whose entries a threshold is a quantile of: `keys.outliers.channel.low` and so on.
THRESHOLD_AXES: Mapping[str, tuple[str, ...]] = {
    "channel": ("layers", "kv_heads", "head_dim", "shares"),
    "head": ("layers", "kv_heads", "shares"),
    "layer": ("layers", "shares"),
}
SINGULAR = {"layers": "layer", "kv_heads": "head", "head_dim": "channel", "shares": "share"}

# How a residual basis' name begins, and its last part.
BASES = tuple(f"{stream}.residual." for stream in STREAMS)
RESIDUAL_BITS = tuple(str(bits) for bits in range(1, 9))

# Rows of a residual basis: a unit of float32 is 1e-7, one of float16 1e-3.
ORTHONORMAL = 1e-3


def clip_form(name: str) -> tuple[str, str] | None:
    """The stream and the form of a clip tensor's name (`keys.clip.32x1` -> `("keys", "32x1")`), else None."""
    return form_after("clip", name)


def residual_form(name: str) -> tuple[str, str, int] | None:
    """Stream, form and bit width of a residual basis' name (`keys.residual.*x1.4` -> `("keys", "*x1", 4)`), else None."""
    stream, rest = form_after("residual", name) or ("", "")
    form, _, bits = rest.rpartition(".")
    return (stream, form, int(bits)) if form and bits in RESIDUAL_BITS else None


def form_after(kind: str, name: str) -> tuple[str, str] | None:
    stream, _, rest = name.partition(f".{kind}.")
    return (stream, rest) if stream in STREAMS and rest else None


def threshold_axes(name: str) -> tuple[str, ...] | None:
    """The axes of an outlier threshold (`keys.outliers.head.low`), else None."""
    stream, _, rest = name.partition(".outliers.")
    part, _, end = rest.partition(".")
    return THRESHOLD_AXES.get(part) if stream in STREAMS and end in ("low", "high") else None


def calibrator_of(name: str) -> str | None:
    """The calibrator or stage of `calib fit` that measures tensor `name`, or None for a name that is not registered."""
    if clip_form(name):
        return "clip"
    if residual_form(name):
        return "residual_basis"
    if name == SHARES or threshold_axes(name):
        return "outlier_thresholds"
    if name in TRANSFORM_CALIBRATORS:
        return TRANSFORM_CALIBRATORS[name]
    stream, _, kind = name.partition(".")
    if stream in STREAMS and kind in CALIBRATORS:
        return CALIBRATORS[kind]
    return PER_CHANNEL[name].calibrator if name in PER_CHANNEL else None


def check_registered(
    tensors: Mapping[str, Tensor], layers: int, kv_heads: int, head_dim: int, clip_bits: Sequence[int]
) -> None:
    """Raises `ArtifactError` where a registered tensor has not the shape, dtype or values its name promises."""
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    if SHARES in tensors:
        check_shares(tensors[SHARES])
        sizes["shares"] = len(tensors[SHARES])
    for name, tensor in tensors.items():
        if name in PER_CHANNEL:
            check_shape(name, tensor, [layers, kv_heads, head_dim], "[layers, kv_heads, head_dim]")
            check_values(name, tensor, PER_CHANNEL[name].above, PER_CHANNEL[name].at_least)
        elif clip_form(name):
            if not clip_bits:
                raise ArtifactError(
                    f"tensor {name!r} is present and clip_bits is empty, expected a width for each entry"
                )
            check_shape(name, tensor, [layers, kv_heads, len(clip_bits)], "[layers, kv_heads, len(clip_bits)]")
            check_values(name, tensor, above=0, at_most=1)
        elif axes := threshold_axes(name):
            if SHARES not in tensors:
                raise ArtifactError(f"tensor {name!r} is present and {SHARES!r} is not, expected both; {FIT_AGAIN}")
            check_shape(name, tensor, [sizes[axis] for axis in axes], f"[{', '.join(axes)}]")
        elif name.startswith(BASES):
            check_basis(name, tensor, layers, kv_heads, head_dim)
    for name in tensors:
        if name in PER_CHANNEL or threshold_axes(name):
            check_order(name, tensors, threshold_axes(name) or ("layers", "kv_heads", "head_dim"))
    for stream in STREAMS:
        check_dictionaries(stream, tensors, layers, head_dim)
    check_transforms(tensors, layers, kv_heads, head_dim)


def check_shares(shares: Tensor) -> None:
    """Of outliers: increasing, above 0 and below 1, at least one."""
    if shares.dtype != float32 or shares.dim() != 1 or not len(shares):
        raise ArtifactError(
            f"tensor {SHARES!r} is {shares.dtype} {list(shares.shape)}, expected {float32} [shares], at least one; "
            f"{FIT_AGAIN}"
        )
    if not bool((shares > 0).all() & (shares < 1).all() & (shares.diff() > 0).all()):
        found = ", ".join(f"{share:.6g}" for share in shares.tolist())
        raise ArtifactError(
            f"tensor {SHARES!r} is {found}, expected increasing numbers above 0 and below 1; {FIT_AGAIN}"
        )


def check_basis(name: str, basis: Tensor, layers: int, kv_heads: int, head_dim: int) -> None:
    """Of a residual: a form and a bit width in its name, [layers, kv_heads, r, head_dim], rows orthonormal."""
    if residual_form(name) is None:
        raise ArtifactError(
            f"tensor {name!r} is of no bit width, expected FORM.BITS with BITS from 1 to 8 after 'residual.'; {FIT_AGAIN}"
        )
    rank = basis.shape[2] if basis.dim() == 4 else 0
    rank = min(max(1, rank), head_dim)
    check_shape(name, basis, [layers, kv_heads, rank, head_dim], "[layers, kv_heads, r <= head_dim, head_dim]")
    wide = basis.double()
    off = (wide @ wide.mT - torch.eye(rank, dtype=wide.dtype)).abs().amax((-2, -1))
    if not bool((off <= ORTHONORMAL).all()):
        layer, head = (off > ORTHONORMAL).nonzero()[0].tolist()
        raise ArtifactError(
            f"tensor {name!r} is off by {off[layer, head]:.3g} at layer {layer}, head {head}, expected rows that are "
            f"orthonormal to {ORTHONORMAL:g}; {FIT_AGAIN}"
        )


def check_order(name: str, tensors: Mapping[str, Tensor], axes: Sequence[str]) -> None:
    """That a tensor `....low` is nowhere above its `....high`, where both are there."""
    stem, _, end = name.rpartition(".")
    high = tensors.get(f"{stem}.high")
    if end != "low" or high is None or not bool((tensors[name] > high).any()):
        return
    place = (tensors[name] > high).nonzero()[0].tolist()
    where = ", ".join(f"{SINGULAR[axis]} {index}" for axis, index in zip(axes, place, strict=True))
    raise ArtifactError(f"tensor {name!r} is above '{stem}.high' at {where}, expected a range; {FIT_AGAIN}")
