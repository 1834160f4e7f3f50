"""In which coordinates a plain codec rounds (option `basis`): the model's channels, or those of a rotation, folded into the query and
the output. The codec, its groups and what they cost stay the same."""

from typing import Literal

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, check_choice
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform import Identity, Orthogonal

Basis = Literal["none", "hadamard", "calibrated"]
BASES = ("none", "hadamard", "calibrated")
SEEDS = {"keys": 0, "values": 1}  # of random rotations


def check_basis(basis: str, statistics: str) -> None:
    """Refuses an unknown basis, and one beside calibrated statistics: those are of channels that nobody rotated."""
    check_choice("basis", basis, BASES)
    if basis != "none" and statistics != "prompt":
        raise ValueError(
            f"basis='{basis}' with statistics='{statistics}': the artifact's ranges are those of channels that are not rotated; use "
            "statistics='prompt', or basis='none'"
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
            f"method '{method}' with basis='calibrated' needs calibrated rotations: pass artifact=Artifact.load(...) from "
            "`calib fit --model.rotations true`"
        )
    return Orthogonal.of(artifact.tensor(f"{stream}.rotation", wanted_by=method)[layer])
