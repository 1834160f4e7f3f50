"""Scales of fp8 keys and values from an artifact's channel ranges.

The engine stores x / scale as float8 e4m3 (greatest value 448; larger ones become 448) and reads code * scale. So

    scale = headroom * max |x| / 448        over a layer, or over each of its KV heads

The maximum is that of the calibrated ranges, so no value of the calibration text is clipped. This scale also has the least error:
an 8-bit float has a relative rounding error of at most 2^-4 between 2^-6 and 448, so a smaller scale improves no value and clips
the largest ones. Integer codes differ in this; the artifact's clip factors are for codes of 1 to 4 bits and are not used here.
`docs/engines.md` has measured errors. For the same reason a larger scale, `headroom`, costs nothing until values fall below 2^-6
scales; it leaves room for text with larger keys and values than the calibration text.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from calib.export.compressed_tensors.attention_layers import AttentionLayer
from calib.runtime import Artifact
from calib.runtime.artifact.tensor_registry import STREAMS

Granularity = Literal["tensor", "head"]

GREATEST = 448.0  # of float8_e4m3fn
PARAMETERS = {"keys": "k_scale", "values": "v_scale"}  # of the attention module, in the checkpoint
LEAST = torch.finfo(torch.float32).tiny  # a smaller scale would be 0 on devices that flush subnormal numbers


def named_scales(
    artifact: Artifact, layers: Sequence[AttentionLayer], granularity: Granularity, headroom: float
) -> dict[str, Tensor]:
    """Returns the scales as tensors of the checkpoint: `MODULE.k_scale` and `MODULE.v_scale` of every layer.

    They are float32, `[1]` (granularity `tensor`) or `[kv_heads, 1, 1]` (`head`).
    """
    found = {stream: scales(artifact, stream, granularity, headroom) for stream in STREAMS}
    return {
        f"{layer.name}.{PARAMETERS[stream]}": found[stream][layer.layer].clone()
        for layer in layers
        for stream in STREAMS
    }


def greatest(artifact: Artifact, stream: str) -> Tensor:
    """Returns max |x| of every layer and KV head, float32 `[layers, kv_heads]`; raises `ArtifactError` without ranges."""
    low, high = (artifact.tensor(f"{stream}.{end}") for end in ("low", "high"))
    return torch.maximum(low.abs(), high.abs()).amax(-1)


def scales(artifact: Artifact, stream: str, granularity: Granularity, headroom: float = 1.0) -> Tensor:
    """Returns the scales of `keys` or `values`, float32 `[layers, 1]` (tensor) or `[layers, kv_heads, 1, 1]` (head).

    A head that was always 0 gets its layer's scale; a layer that was always 0, or had no samples (`unmeasured`), gets 1, which
    engines also assume for layers without scales.
    """
    heads = greatest(artifact, stream)
    layer = heads.amax(-1, keepdim=True)
    chosen = layer if granularity == "tensor" else torch.where(heads > 0, heads, layer)[:, :, None, None]
    found = chosen * (headroom / GREATEST)
    return torch.where(found >= LEAST, found, 1.0)


def unmeasured(artifact: Artifact) -> list[int]:
    """Returns the layers whose keys or values were all 0, as in layers without samples."""
    reached = torch.stack([greatest(artifact, stream).amax(-1) for stream in STREAMS]).amin(0) > 0
    return (~reached).nonzero().flatten().tolist()
