"""Two options of plain quantisers (`rtn`, `kivi`, SpeCache's low-bit copy). `basis`: the coordinates that are rounded, the model's
channels or those of a rotation, which is folded into the query and the output. `key_bias`: whether keys are rounded with the bias
of their projection or without. The codec, its groups and their cost stay the same."""

from typing import Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, check_choice
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform import Identity, Orthogonal

Basis = Literal["none", "hadamard", "calibrated"]
BASES = ("none", "hadamard", "calibrated")
KeyBias = Literal["kept", "folded"]
KEY_BIASES = ("kept", "folded")
SEEDS = {"keys": 0, "values": 1}  # seeds of the random rotations


def check_basis(basis: str, statistics: str) -> None:
    """Raises ValueError for an unknown basis, and for a rotation with calibrated statistics, which hold for channels not
    rotated."""
    check_choice("basis", basis, BASES)
    if basis != "none" and statistics != "prompt":
        raise ValueError(
            f"basis='{basis}' with statistics='{statistics}': the artifact's ranges are those of channels that are not rotated; "
            "use statistics='prompt', or basis='none'"
        )


def check_key_bias(key_bias: str, statistics: str) -> None:
    """Raises ValueError for an unknown word, and for "folded" with calibrated statistics, which hold for keys with their bias."""
    check_choice("key_bias", key_bias, KEY_BIASES)
    if key_bias == "folded" and statistics != "prompt":
        raise ValueError(
            f"key_bias='folded' with statistics='{statistics}': the artifact's ranges are those of keys with their bias; use "
            "statistics='prompt', or key_bias='kept'"
        )


def basis_of(
    basis: str, stream: str, layer: int, geometry: Geometry, artifact: Artifact | None, method: str
) -> Transform:
    """Returns the transform of one stream of one layer; raises ValueError for "calibrated" without an artifact."""
    if basis == "none":
        return Identity()
    if basis == "hadamard":
        return Orthogonal.random_hadamard(geometry.head_dim, SEEDS[stream])
    if artifact is None:
        raise ValueError(
            f"method '{method}' with basis='calibrated' needs calibrated rotations: pass artifact=Artifact.load(...), or "
            "--artifact FILE, from `calib fit --model.rotations true`"
        )
    return Orthogonal.of(artifact.tensor(f"{stream}.rotation", wanted_by=method)[layer])
