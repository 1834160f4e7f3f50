"""The queries of a layer, grouped by KV head."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from calib.kernels.attend.reference import scaled
from calib.kernels.dispatch import prefers_triton


@dataclass
class GroupedQuery:
    """Queries, grouped by KV head.

    Attributes:
        given: the model's queries `[rows, kv_heads, R, D]`: the R query rows of a KV head are group-major, then the columns.
        scale: the factor of the scores.
    """

    given: Tensor
    scale: float

    @cached_property
    def scaled(self) -> Tensor:
        """The query in float32, times the scale."""
        return scaled(self.given, self.scale)

    @property
    def for_kernels(self) -> tuple[Tensor, float]:
        """Query and scale for attention's kernels: on a GPU the kernels multiply by the scale, on a CPU it is applied here once."""
        return (self.given, self.scale) if prefers_triton(self.given.device) else (self.scaled, 1.0)
