"""Plain offload: the full cache in host memory, all of it fetched in every step; what selective fetching is measured against."""

from dataclasses import dataclass

from calib.runtime.artifact import Artifact
from calib.runtime.methods.contract import Geometry
from calib.runtime.ordered.store import LayerPlan


@dataclass(frozen=True)
class Offload:
    """Keys and values stay exact and lie on the host, pinned where a GPU attends; a tile at a time comes to the device.

    No options, no statistics. On the device there is nothing but the tile that is attended.
    """

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """The same two streams for every layer."""
        return LayerPlan.exact(on_host=True)
