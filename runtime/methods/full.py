"""The full cache: every token as the model made it, in the same pages and through the same attention as the others."""

from dataclasses import dataclass

from calib.runtime.artifact import Artifact
from calib.runtime.methods.contract import Geometry
from calib.runtime.ordered.store import LayerPlan


@dataclass(frozen=True)
class Full:
    """Keys and values stay exact (16 bits a value for a 16-bit model). No options, no statistics."""

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """The same two streams for every layer."""
        return LayerPlan.exact()
