"""The queries of a layer, by the KV head that they meet."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from calib.kernels.attend.reference import scaled
from calib.kernels.dispatch import prefers_triton


@dataclass
class GroupedQuery:
    """Query rows of KV heads.

    Attributes:
        given: as the model made them, `[rows, kv_heads, R, D]`: the rows R of a KV head are group-major, then the columns.
        scale: of the scores.
    """

    given: Tensor
    scale: float

    @cached_property
    def scaled(self) -> Tensor:
        """Float32, times the scale."""
        return scaled(self.given, self.scale)

    @property
    def for_kernels(self) -> tuple[Tensor, float]:
        """Query and scale as attention's kernels take them: those of a GPU multiply, on a CPU it is done once for all."""
        return (self.given, self.scale) if prefers_triton(self.given.device) else (self.scaled, 1.0)
