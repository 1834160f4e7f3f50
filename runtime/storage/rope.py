"""A model's RoPE from the configuration in its artifact's fingerprint, because stores of chunks may not have the model."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.fingerprint import stable
from calib.runtime.messages.artifact_error import ArtifactError
from calib.runtime.messages.printable import printable, shortened
from calib.runtime.methods import Geometry
from calib.runtime.rotation import Rotation

REMEDY = "pass rotation=Rotation.of(model, '') of calib.runtime.rotation"
LONGEST = 120  # characters of transformers' own message


def rotation_of(artifact: Artifact) -> Rotation:
    """Returns the rotation as the model's class in transformers computes it. Raises ArtifactError if there is no such class or it
    differs from the fingerprint, and ValueError if RoPE cannot be undone."""
    fingerprint = artifact.fingerprint
    config = _config(fingerprint)
    found = (Geometry.of(config), stable(getattr(config, "rope_parameters", None)))
    wanted = (
        Geometry(fingerprint["layers"], fingerprint["kv_heads"], fingerprint["head_dim"]),
        fingerprint["rope"],
    )
    if found != wanted:
        raise ArtifactError(
            f"the artifact's configuration gives {printable(found)} with this version of transformers, and was fitted with "
            f"{printable(wanted)}; {REMEDY}"
        )
    rotation = Rotation.of(_embedding(config), REMEDY)
    if 2 * len(rotation.frequencies) > fingerprint["head_dim"]:
        raise ArtifactError(
            f"the artifact's RoPE rotates {2 * len(rotation.frequencies)} channels, head_dim is {fingerprint['head_dim']}; {REMEDY}"
        )
    return rotation


def _config(fingerprint: Mapping[str, Any]) -> PreTrainedConfig:
    fields = {name: value for name, value in fingerprint["config"].items() if name != "model_type"}
    for rope in _parameters(fields.get("rope_parameters")):
        share = rope.get("partial_rotary_factor", 1.0)
        if type(share) not in (float, int) or not 0 < share <= 1:  # it determines the size of tables
            raise ArtifactError(
                f"the artifact's partial_rotary_factor is {printable(share)}, expected a number in (0, 1]; {REMEDY}"
            )
    try:
        return AutoConfig.for_model(fingerprint["architecture"], **fields)
    except Exception as error:  # a configuration's class may raise anything for unknown fields
        reason = shortened(" ".join(str(error).split()), LONGEST)
        raise ArtifactError(
            f"transformers cannot make a configuration of architecture "
            f"{printable(fingerprint['architecture'])} ({reason}); {REMEDY}"
        ) from error


def _parameters(rope: Any) -> list[Mapping[str, Any]]:
    """RoPE's parameters, and those of each kind of layer if kinds differ."""
    if not isinstance(rope, Mapping):
        return []
    return [rope, *(own for own in rope.values() if isinstance(own, Mapping))]


def _embedding(config: PreTrainedConfig) -> nn.Module:
    """The rotary embedding for text that is defined in the model's own file in transformers."""
    name = type(config).__name__
    try:
        module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    except KeyError as error:
        raise ArtifactError(f"transformers has no causal language model of a {name}; {REMEDY}") from error
    classes = [
        part
        for called, part in vars(module).items()
        if called.endswith("RotaryEmbedding") and "Vision" not in called and part.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise ArtifactError(f"{module.__name__} has {len(classes)} rotary embeddings, expected one; {REMEDY}")
    embedding: nn.Module = classes[0](config)
    return embedding
