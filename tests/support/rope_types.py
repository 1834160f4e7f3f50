"""Types of RoPE by the papers' equations in float64, for heads of 32 channels: a model's `rope_parameters`, its frequencies, and
the factor by which it also multiplies rotated keys and queries.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 512  # positions of the model before RoPE was scaled
CHANNELS = 32


class RopeType(NamedTuple):
    """`parameters` of a configuration; the pairs' `frequencies`, float64 `[CHANNELS / 2]`; and the `factor`."""

    parameters: dict[str, Any]
    frequencies: Tensor
    factor: float = 1.0


def plain(theta: float) -> Tensor:
    """theta^(-2i/D) of the pairs of D channels (arXiv:2104.09864)."""
    return theta ** (-torch.arange(0, CHANNELS, 2).double() / CHANNELS)


def yarn(theta: float, factor: float) -> Tensor:
    """YaRN's frequencies (arXiv:2309.00071, section 3.2), with its beta of 32 and alpha of 1; as in its code, a pair's number
    decides, between the two at which so many rotations fit into the original length, rounded outwards."""
    most, least = (
        CHANNELS * math.log(LENGTH / (2 * math.pi * rotations)) / (2 * math.log(theta)) for rotations in (32, 1)
    )
    first, last = max(0, math.floor(most)), min(CHANNELS - 1, math.ceil(least))
    interpolated = ((torch.arange(CHANNELS // 2) - first) / (last - first)).clamp(0, 1).double()
    return plain(theta) * (1 - interpolated + interpolated / factor)


def llama3(theta: float, factor: float, low: float, high: float) -> Tensor:
    """Llama 3.1's frequencies: by the number of rotations in the original length, a factor's share below `low`, whole above
    `high`."""
    frequencies = plain(theta)
    whole = ((LENGTH * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return frequencies * (whole + (1 - whole) / factor)


_YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0, "original_max_position_embeddings": LENGTH}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 500000.0,
}
ROPE_TYPES = {
    "yarn": RopeType(_YARN, yarn(1e4, 8), 0.1 * math.log(8) + 1),
    "yarn, another factor": RopeType(_YARN | {"attention_factor": 1.7}, yarn(1e4, 8), 1.7),
    "llama3": RopeType(_LLAMA3 | {"original_max_position_embeddings": LENGTH}, llama3(5e5, 8, 1, 4)),
    "linear": RopeType({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, plain(1e4) / 4),
    "default": RopeType({"rope_type": "default", "rope_theta": 10000.0}, plain(1e4)),
}
