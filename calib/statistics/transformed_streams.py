"""The three streams that `klt` transforms: keys after RoPE, values, and keys unrotated to position 0.

Statistics of all streams have a leading axis S, in the order of `TRANSFORMS`: 3, or 2 if the model's RoPE cannot be unrotated.
Unrotated keys are those that the runtime stores before RoPE: if the model scales rotated keys by a constant (YaRN), they keep it.
"""

from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.sample import SINKS, LayerSample
from calib.runtime.artifact.transform_tensors import TRANSFORMS
from calib.runtime.rotation import Rotation


def rotation_of(model: PreTrainedModel) -> Rotation | None:
    """Returns the model's RoPE; None if it cannot be unrotated (then there is no stream of keys before RoPE)."""
    try:
        return Rotation.of(model, "")
    except ValueError:
        return None


def streams(rotation: Rotation | None) -> tuple[str, ...]:
    """Returns the names of the streams."""
    return TRANSFORMS if rotation is not None else TRANSFORMS[:-1]


def vectors(sample: LayerSample, rotation: Rotation | None) -> list[Tensor]:
    """Returns the sample's vectors of each stream, `[batch, kv_heads, tokens, head_dim]`; unrotated keys are float32."""
    before = [] if rotation is None else [unrotated(sample.keys, sample.positions, rotation)]
    return [sample.keys, sample.values, *before]


def unrotated(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Returns `x [batch, heads, tokens, head_dim]` (keys, queries or derivatives by keys) unrotated to position 0: float32.

    Rotations are orthogonal, so a derivative by a key is unrotated like the key.
    """
    cos, sin = (part[:, None] for part in rotation.at(positions))
    return Rotation.rotated(x.float(), cos, -sin)


def coded(sample: LayerSample) -> Tensor:
    """Returns the mask of real tokens that a cache may code: bool `[batch, tokens]`, False for the first `SINKS`, kept exact."""
    return sample.mask & (sample.numbers >= SINKS)
