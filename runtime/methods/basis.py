"""In which coordinates a plain codec rounds: the model's channels, or those of a rotation, folded into the query and the
output (option `basis`); and whether keys are rounded with the bias of their projection (option `key_bias`). The codec, its
groups and what they cost stay the same."""

from typing import Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, check_choice
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform import Identity, Orthogonal

Basis = Literal["none", "hadamard", "calibrated"]
BASES = ("none", "hadamard", "calibrated")
KeyBias = Literal["kept", "folded"]
KEY_BIASES = ("kept", "folded")
SEEDS = {"keys": 0, "values": 1}  # of random rotations


def check_basis(basis: str, statistics: str) -> None:
    """Refuses an unknown basis, and one beside calibrated statistics: those are of channels that nobody rotated."""
    check_choice("basis", basis, BASES)
    if basis != "none" and statistics != "prompt":
        raise ValueError(
            f"basis='{basis}' with statistics='{statistics}': the artifact's ranges are those of channels that are not rotated; "
            "use statistics='prompt', or basis='none'"
        )


def check_key_bias(key_bias: str, statistics: str) -> None:
    """Refuses an unknown word, and folding beside calibrated statistics: those are of keys with their bias."""
    check_choice("key_bias", key_bias, KEY_BIASES)
    if key_bias == "folded" and statistics != "prompt":
        raise ValueError(
            f"key_bias='folded' with statistics='{statistics}': the artifact's ranges are those of keys with their bias; use "
            "statistics='prompt', or key_bias='kept'"
        )


def basis_of(
    basis: str, stream: str, layer: int, geometry: Geometry, artifact: Artifact | None, method: str
) -> Transform:
    """The transform of one stream of one layer; ValueError where the artifact that it is in was not given."""
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
