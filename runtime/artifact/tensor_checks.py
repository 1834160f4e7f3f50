"""Checks that several registered tensors share: dtype and shape, and the values allowed."""

import torch
from torch import Tensor, float32

from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.messages.printable import printable


def check_shape(name: str, tensor: Tensor, expected: list[int], axes: str, dtype: torch.dtype = float32) -> None:
    """Raises `ArtifactError` unless `tensor` has `dtype` and the shape `expected`, whose axes a message calls `axes`."""
    if list(tensor.shape) != expected or tensor.dtype != dtype:
        raise ArtifactError(
            f"tensor {printable(name)} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {expected} = {axes} "
            f"of the fingerprint; {FIT_AGAIN}"
        )


def check_values(name: str, tensor: Tensor, least: float, most: float) -> None:
    """Raises `ArtifactError` unless every entry is from `least` to `most`; NaN is not."""
    if tensor.numel() == 0:
        return
    low, high = (end.item() for end in torch.aminmax(tensor))
    if not (low >= least and high <= most):
        raise ArtifactError(
            f"tensor {printable(name)} has values from {low:.6g} to {high:.6g}, expected {least:.6g} to {most:.6g}; "
            f"{FIT_AGAIN}"
        )
