"""Plain offload: the full cache in host memory, all of it fetched in every step; the baseline of selective fetching."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.contract import Geometry, Method
from calib.runtime.ordered.store import LayerPlan


@dataclass(frozen=True)
class Offload(Method):
    """Keys and values stay exact in host memory, pinned where a GPU attends; attention copies them to the device tile by tile.

    No options, no statistics. Only the tile that is being attended is on the device.
    """

    name: ClassVar[str] = "offload"

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """The same two streams for every layer."""
        return LayerPlan.exact(on_host=True)
