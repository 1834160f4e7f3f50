"""The tensors an artifact may hold: names, dtypes, shapes, the least and the greatest value, and the calibrators that measure them.

`TABLE` has them all. Checks of relations between entries (a range, an orthonormal basis, groups of layers) are in
`tensor_relations.py`; `docs/artifact_format.md` describes the same in prose. An artifact may have other names as well: those of
calibrators that this version does not know.

Every limit is far outside the values of models, and narrow enough that numbers computed from an entry stay finite in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, float32

from calib.runtime.artifact.nuq_tensors import NUQ_BITS, NUQ_SHARES, levels_name
from calib.runtime.artifact.tensor_checks import check_shape, check_values
from calib.runtime.artifact.tensor_relations import (
    Sizes,
    check_curve,
    check_dictionary,
    check_directions,
    check_divergence,
    check_falling,
    check_groups,
    check_levels,
    check_nuq_shares,
    check_order,
    check_orthonormal,
    check_shares,
)
from calib.runtime.artifact.transform_tensors import KINDS, LOSSES, STORAGE, STREAM_KINDS, check_complete
from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.messages.printable import printable

STREAMS = ("keys", "values")

LARGEST = 65504.0  # the largest float16: a key or a value beyond it cannot be stored
NARROWEST = 2.0**-24  # the least float16 above 0
LEAST_SCALE = 1e-12  # a value divided by it can be squared and summed in float32
GREATEST_SCALE = 256.0  # a little more than sqrt(LARGEST)
# Limits for components, whose unit makes the error of a whole cache about 1; in a head that gets no attention they are small.
# How tensors of components fit together is checked where they are used (`components.py`).
GREATEST_BASIS = 1e18
LEAST_STEP, GREATEST_STEP = 1e-24, 1e12
GREATEST_ERROR = 1e12  # of losses, too, in nats a token
SYMMETRIC = 1e-6  # tolerance above ln 2, the largest divergence: a few units of float32

# Axes whose size the tensor itself determines: any size, or at most that of another axis.
FREE: Mapping[str, str] = {"n": "", "r <= head_dim": "head_dim", "atoms": "", "channels": "", "budgets": ""}


@dataclass(frozen=True)
class Registered:
    """The requirements of a registered tensor.

    Attributes:
        calibrator: the calibrator or stage of `calib fit` that measures it.
        axes: the name of each axis, or its size as digits.
        least, most: limits of every entry.
        dtype: its dtype.
        check: checks relations between its entries, given its name, itself and the sizes of axes; raises `ArtifactError`.
    """

    calibrator: str
    axes: tuple[str, ...]
    least: float
    most: float
    dtype: torch.dtype = float32
    check: Callable[[str, Tensor, Sizes], None] | None = None


# Calibrators that measure nothing unless an option of `calib fit` is given, and that option.
NUQ_OPTION = "--model.nuq [0.01]"
OPTIONS: Mapping[str, str] = {
    "rotations": "--model.rotations true",
    "nuq_ranges": NUQ_OPTION,
    "nuq_levels": NUQ_OPTION,
    "storage_codes": "--model.storage true",
}

PER_CHANNEL = ("layers", "kv_heads", "head_dim")
# Shares of outliers, both ends together: the last axis of every threshold (GEAR, arXiv:2403.05527, eq. 4).
SHARES = "outliers.shares"
# Tensors whose length is the size of an axis of other tensors, and the name of that axis.
SHARE_AXES: Mapping[str, str] = {SHARES: "shares", NUQ_SHARES: "nuq shares"}
SHARES_OF: Mapping[str, str] = {axis: name for name, axis in SHARE_AXES.items()}
# The entries of which a threshold is a quantile, as named in `keys.outliers.channel.low` and so on, and the axes.
THRESHOLD_AXES: Mapping[str, tuple[str, ...]] = {
    "channel": (*PER_CHANNEL, "shares"),
    "head": ("layers", "kv_heads", "shares"),
    "layer": ("layers", "shares"),
}


def _ends(stem: str, calibrator: str, axes: tuple[str, ...]) -> dict[str, Registered]:
    """The two tensors of a range, `STEM.low` and `STEM.high`."""
    return {f"{stem}.{end}": Registered(calibrator, axes, -LARGEST, LARGEST) for end in ("low", "high")}


def _of_stream(stream: str) -> dict[str, Registered]:
    """The tensors that both keys and values have: ranges, outlier thresholds, levels, rotations, layer groups, dictionaries."""
    distance = math.log(2) + SYMMETRIC
    found = _ends(stream, "channel_range", PER_CHANNEL)  # of keys after RoPE
    for part, axes in THRESHOLD_AXES.items():
        found |= _ends(f"{stream}.outliers.{part}", "outlier_thresholds", axes)
    for bits in NUQ_BITS:
        axes = ("layers", "nuq shares", str(2**bits))
        found[levels_name(stream, bits)] = Registered("nuq_levels", axes, -1, 1, check=check_levels)
    return found | {
        f"{stream}.layer_groups": Registered(
            "layer_groups", ("layers",), -math.inf, math.inf, torch.int64, check_groups
        ),
        f"{stream}.divergence": Registered("layer_groups", ("layers",) * 2, 0, distance, check=check_divergence),
        f"{stream}.rotation": Registered(
            "rotations",
            (*PER_CHANNEL, "head_dim"),
            -1.01,
            1.01,
            check=check_orthonormal,
        ),
        f"{stream}.dictionary": Registered(
            "dictionaries", ("groups", "atoms", "channels"), -1.01, 1.01, torch.float16, check_dictionary
        ),
    }


def _of_transform(stream: str, names: Sequence[str]) -> dict[str, Registered]:
    """The tensors of components that a stream has, of the kinds `names`."""
    square, big = (*PER_CHANNEL, "head_dim"), GREATEST_BASIS
    kinds = {
        "mean": Registered("components", PER_CHANNEL, -LARGEST, LARGEST),
        "basis": Registered("components", square, -big, big, check=check_directions),
        "steps": Registered("components", (*PER_CHANNEL, "8"), LEAST_STEP, GREATEST_STEP),
        "errors": Registered("components", (*PER_CHANNEL, "9"), 0, GREATEST_ERROR, check=check_falling),
        "matrix": Registered("components", square, -big, big),
    }
    return {f"{stream}.{kind}": kinds[kind] for kind in names}


def _of_storage(stream: str) -> dict[str, Registered]:
    """The tensors of components of all heads of a layer together, and the matrix of their prediction."""
    of_heads = dict(zip(PER_CHANNEL[1:], ("1", "width"), strict=True))
    found = {
        name: replace(one, calibrator="storage_codes", axes=tuple(of_heads.get(axis, axis) for axis in one.axes))
        for name, one in _of_transform(stream, KINDS).items()
    }
    known = "2 width" if stream.startswith("keys") else "3 width"
    matrix = Registered("storage_codes", ("layers", known, "width"), -GREATEST_BASIS, GREATEST_BASIS)
    return {**found, f"{stream}.matrix": matrix}


TABLE: dict[str, Registered] = {
    # sqrt(max_t |v|), ZipCache (arXiv:2405.14256) eq. 6
    "values.scale": Registered("channel_scale", PER_CHANNEL, LEAST_SCALE, GREATEST_SCALE),
    # sqrt(max_t |q| / max_t |k|), MiKV (arXiv:2402.18096) eq. 2-4
    "keys.balancer": Registered("balancer", PER_CHANNEL, NARROWEST, LARGEST),
    # mean of q^2 over tokens and query heads
    "queries.mean_square": Registered("query_energy", PER_CHANNEL, 0, LARGEST**2),
    SHARES: Registered("outlier_thresholds", ("n",), 0, 1, check=check_shares),
    NUQ_SHARES: Registered("nuq_ranges", ("n",), 0, 1, check=check_nuq_shares),
    **_ends("keys.nuq", "nuq_ranges", (*PER_CHANNEL, "nuq shares")),  # of keys before RoPE
}
for _stream in STREAMS:
    TABLE |= _of_stream(_stream)
for _stream, _kinds in STREAM_KINDS.items():
    TABLE |= _of_transform(_stream, _kinds)
for _stream in STORAGE:
    TABLE |= _of_storage(_stream)
for _name in LOSSES.values():
    TABLE[_name] = Registered("loss_curve", ("budgets", "2"), 0, GREATEST_ERROR, check=check_curve)
# `keys.clip.FORM` and `keys.residual.FORM.BITS`, for any form.
CLIP = Registered("clip", ("layers", "kv_heads", "len(clip_bits)"), NARROWEST, 1)
RESIDUAL = Registered(
    "residual_basis", ("layers", "kv_heads", "r <= head_dim", "head_dim"), -1.01, 1.01, check=check_orthonormal
)
RESIDUALS = tuple(f"{stream}.residual." for stream in STREAMS)
RESIDUAL_BITS = tuple(str(bits) for bits in range(1, 9))


def registered(name: str) -> Registered | None:
    """Returns the requirements of tensor `name`, or None if it is not registered."""
    if clip_form(name):
        return CLIP
    return RESIDUAL if residual_form(name) else TABLE.get(name)


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


def calibrator_of(name: str) -> str | None:
    """The calibrator or stage of `calib fit` that measures tensor `name`, or None for a name that is not registered."""
    found = registered(name)
    return None if found is None else found.calibrator


def option_of(name: str) -> str:
    """The option of `calib fit` without which tensor `name` is not measured; "" if there is none."""
    return OPTIONS.get(calibrator_of(name) or "", "")


def check_registered(
    tensors: Mapping[str, Tensor], layers: int, kv_heads: int, head_dim: int, clip_bits: Sequence[int]
) -> None:
    """Raises `ArtifactError` if a registered tensor does not have the required dtype, shape or values."""
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "len(clip_bits)": len(clip_bits)}
    width = kv_heads * head_dim
    sizes |= {"width": width, "2 width": 2 * width, "3 width": 3 * width}
    # First the tensors that determine sizes of axes of others.
    for name in sorted(tensors, key=lambda name: name not in SHARE_AXES and not name.endswith(".layer_groups")):
        promised = registered(name)
        if promised is not None:
            check_one(name, tensors[name], promised, sizes)
        elif name.startswith(RESIDUALS):
            raise ArtifactError(
                f"tensor {printable(name)} has no valid bit width in its name, expected FORM.BITS with BITS from 1 to 8 "
                f"after 'residual.'; {FIT_AGAIN}"
            )
        if name in SHARE_AXES:
            sizes[SHARE_AXES[name]] = len(tensors[name])
        elif name in TABLE and name.endswith(".layer_groups"):
            sizes[groups_of(name)] = int(tensors[name][-1]) + 1
    for name in tensors:
        if name in TABLE and name.endswith(".low"):
            check_order(name, tensors, TABLE[name].axes)
    check_complete(tensors)


def check_one(name: str, tensor: Tensor, promised: Registered, sizes: Sizes) -> None:
    """Checks one tensor; raises `ArtifactError`, also if a tensor is missing that determines the size of an axis."""
    expected = []
    for number, axis in enumerate(promised.axes):
        found = tensor.shape[number] if number < tensor.dim() else 0
        if axis in FREE:
            expected.append(min(max(1, found), sizes.get(FREE[axis], found + 1)))
        else:
            expected.append(int(axis) if axis.isdigit() else size_of(name, axis, sizes))
    check_shape(name, tensor, expected, f"[{', '.join(promised.axes)}]", promised.dtype)
    check_values(name, tensor, promised.least, promised.most)
    if promised.check is not None:
        promised.check(name, tensor, sizes)


def size_of(name: str, axis: str, sizes: Sizes) -> int:
    """The size of an axis of tensor `name`, from another tensor, the fingerprint or `clip_bits`; raises `ArtifactError`."""
    other = groups_of(name) if axis == "groups" else SHARES_OF.get(axis, "")
    size = sizes.get(other if axis == "groups" else axis, 0)
    if not size:
        missing = f"{other!r} is not, expected both" if other else "clip_bits is empty, expected a width for each entry"
        raise ArtifactError(f"tensor {printable(name)} is present and {missing}; {FIT_AGAIN}")
    return size


def groups_of(name: str) -> str:
    """The name of the tensor of layer groups for the stream of tensor `name`; its dictionaries are one for each group."""
    return f"{name.partition('.')[0]}.layer_groups"
