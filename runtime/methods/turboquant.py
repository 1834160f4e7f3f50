"""TurboQuant (Zandieh et al., 2025, arXiv:2504.19874): a random rotation, then one table for every coordinate; no data, no fit."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.basis import SEEDS
from calib.runtime.methods.contract import Geometry, Method, check_bits
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.per_stream import Streams, of_streams
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.stages.codec import Codec, Direction
from calib.runtime.stages.schedule import SlidingResidual
from calib.runtime.stages.transform import Orthogonal


@dataclass(frozen=True)
class TurboQuant(Method):
    """Data-free vector quantisation that minimises the squared error (algorithm 1, TurboQuant_mse).

    1. Attention over a prompt is exact.
    2. A key (after RoPE) or value x of a head is rotated by a random orthogonal matrix, one for all keys and one for all values.
    3. Its norm |x| is kept in 16 bits. Each coordinate of x / |x| becomes the index of the nearest entry of a table: the Lloyd-Max
       quantiser of a coordinate of a random direction.
    4. Cost of an encoded value: bits + 16 / head_dim. By default no window stays exact (`residual`).

    Not implemented are the paper's second algorithm, which uses one bit of the keys for an unbiased estimate of inner products, and
    its split of channels into two widths (2.5 and 3.5 bits).

    Args:
        bits: width of a coordinate's index, 1 ... 8, for both streams, or {keys: ..., values: ...}.
        residual: newest tokens that stay exact.
    """

    name: ClassVar[str] = "turboquant"
    packs: ClassVar[tuple[type[Codec], ...]] = (Direction,)

    grid: ClassVar[Grid] = Grid({"bits": (1, 2, 3, 4, 5, 6, 8)})

    bits: int | Streams[int] = 4
    residual: int = 0

    def __post_init__(self) -> None:
        of_streams("bits", self.bits, check_bits)
        check_whole("residual", self.residual, 0, "a whole number of tokens, at least 0")

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """Both streams, the same for every layer."""
        schedule, bits = SlidingResidual(self.residual), of_streams("bits", self.bits)
        keys, values = (
            StreamPlan(
                Orthogonal.drawn(geometry.head_dim, seed), Direction.uniform(geometry.head_dim, bits.of(role)), schedule
            )
            for role, seed in SEEDS.items()
        )
        return LayerPlan(keys, values)
