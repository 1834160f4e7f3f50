"""Checks that several registered tensors share: shape and dtype, and the values allowed."""

import torch
from torch import Tensor, float32

from calib.runtime.artifact_error import FIT_AGAIN, ArtifactError


def check_shape(name: str, tensor: Tensor, expected: list[int], axes: str, dtype: torch.dtype = float32) -> None:
    """Raises `ArtifactError` unless `tensor` is `dtype` of the shape `expected`, whose axes are called `axes`."""
    if list(tensor.shape) != expected or tensor.dtype != dtype:
        raise ArtifactError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {expected} = {axes} "
            f"of the fingerprint; {FIT_AGAIN}"
        )


def check_values(
    name: str, tensor: Tensor, above: float | None = None, at_least: float | None = None, at_most: float | None = None
) -> None:
    """Raises `ArtifactError` where an entry is outside the limits given."""
    if tensor.numel() == 0:
        return
    least, most = tensor.min().item(), tensor.max().item()
    broken = [
        *([f"above {above:.6g}"] if above is not None and least <= above else []),
        *([f"at least {at_least:.6g}"] if at_least is not None and least < at_least else []),
        *([f"at most {at_most:.6g}"] if at_most is not None and most > at_most else []),
    ]
    if broken:
        raise ArtifactError(
            f"tensor {name!r} has values from {least:.6g} to {most:.6g}, expected {' and '.join(broken)}; {FIT_AGAIN}"
        )
