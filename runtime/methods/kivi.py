"""KIVI (Liu et al., 2024, arXiv:2402.02750): keys per channel, values per token, the newest tokens exact."""

from dataclasses import dataclass
from typing import Any, ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.whole_numbers import check_whole
from calib.runtime.methods.basis import Basis, KeyBias, basis_of, check_basis, check_key_bias
from calib.runtime.methods.calibration import (
    Statistics,
    channel_range,
    channel_scale,
    check_statistics,
    clip_factor,
    clip_of_streams,
)
from calib.runtime.methods.contract import Geometry, Method, check_bits
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.per_stream import PerStream, Streams, of_streams
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.stages.codec import Codec, UniformQuant
from calib.runtime.stages.codec.uniform import not_divided
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.schedule import Blocks, SlidingResidual
from calib.runtime.stages.transform import WithoutBias


@dataclass(frozen=True)
class Kivi(Method):
    """Asymmetric quantisation of keys and values after RoPE.

    1. Attention over a prompt is exact.
    2. Keys: once a block of `residual` tokens is full it is encoded per channel, `group` tokens sharing a scale and a
       zero point (group (g, 1)); the newest `length mod residual` keys stay exact.
    3. Values: all but the last `residual` are encoded per token, `group` channels sharing parameters (group (1, g)).
    4. Cost of an encoded value: bits + 32/group (2 bit, g = 32: 3.0), more where codes do not fill 16-bit words
       (`kernels/pack`). With `statistics="calibrated"` keys take their channels' ranges from the artifact and store no
       parameters (2.0), and values are divided by the artifact's channel scale before step 3 (ZipCache's eq. 6).

    Each option but `statistics` and `basis` is one setting for both streams, or {keys: ..., values: ...}.

    Args:
        bits: 1 ... 8. 1 bit wants clip 0.5 (SpeCache, eq. 3).
        group: tokens (keys) or channels (values) that share parameters. The group of keys must divide their `residual` and 128,
            the group of values must divide head_dim.
        residual: exact window R in tokens; at least 1. A key is encoded no later than its value: R of keys is at most R of values
            plus 1.
        statistics: "prompt", or "calibrated" (needs `keys.low/high` and `values.scale`).
        clip: factor on the range in (0, 1]; None takes the artifact's calibrated one, 1 without an artifact, in another basis, or
            for keys with `key_bias="folded"`.
        basis: coordinates that are rounded: the channels ("none"), those of a random Hadamard rotation ("hadamard"), or of the
            artifact's rotations, as `oscar` has them ("calibrated").
        key_bias: the bias of the model's key projection is encoded as a part of every key ("kept"), or subtracted before keys are
            encoded, and its part of the logits added in attention ("folded").
    """

    name: ClassVar[str] = "kivi"
    packs: ClassVar[tuple[type[Codec], ...]] = (UniformQuant,)

    grid: ClassVar[Grid] = Grid(
        {
            "bits": (1, 2, 3, 4, 5, 6, 8),
            "group": (32, 64, 128),
            "statistics": ("prompt", "calibrated"),
            "clip": (None, 1.0, 0.8, 0.6),
        }
    )

    bits: int | Streams[int] = 2
    group: int | Streams[int] = 32
    residual: int | Streams[int] = 128
    statistics: Statistics = "prompt"
    clip: float | Streams[float | None] | None = None
    basis: Basis = "none"
    key_bias: KeyBias = "kept"

    def __post_init__(self) -> None:
        of_streams("bits", self.bits, check_bits)
        self._residual()
        self._group()
        clip_of_streams(self.clip)
        check_basis(self.basis, self.statistics)
        check_key_bias(self.key_bias, self.statistics)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """The stages of keys and of values of one layer."""
        check_statistics(self.statistics, artifact, "kivi")
        if geometry.head_dim % (
            group := self._group().values
        ):  # told before the artifact's lack of clip factors for it
            raise not_divided(group, geometry.head_dim, "channels")
        keys, values = (
            basis_of(self.basis, stream, layer, geometry, artifact, "kivi") for stream in ("keys", "values")
        )
        measured = artifact if self.basis == "none" else None  # its other statistics are for unrotated channels
        if self.key_bias == "folded":
            return LayerPlan(self._keys(WithoutBias(keys), layer, None), self._values(values, layer, measured))
        return LayerPlan(self._keys(keys, layer, measured), self._values(values, layer, measured))

    def _keys(self, transform: Transform, layer: int, artifact: Artifact | None) -> StreamPlan:
        bits, group, schedule = of_streams("bits", self.bits).keys, self._group().keys, Blocks(self._residual().keys)
        given = clip_of_streams(self.clip).keys
        if self.statistics == "calibrated" and artifact is not None:
            clip = clip_factor(given, artifact, "keys", "fixed", bits, layer)
            return StreamPlan(channel_range(artifact, "keys", layer, "kivi"), UniformQuant(bits, None, clip), schedule)
        clip = clip_factor(given, artifact, "keys", f"{group}x1", bits, layer)
        return StreamPlan(transform, UniformQuant(bits, (group, 1), clip), schedule)

    def _values(self, transform: Transform, layer: int, artifact: Artifact | None) -> StreamPlan:
        bits, group = of_streams("bits", self.bits).values, self._group().values
        given, schedule = clip_of_streams(self.clip).values, SlidingResidual(self._residual().values)
        if self.statistics == "calibrated" and artifact is not None:
            clip = clip_factor(given, artifact, "values", f"scaled.1x{group}", bits, layer)
            return StreamPlan(channel_scale(artifact, layer, "kivi"), UniformQuant(bits, (1, group), clip), schedule)
        clip = clip_factor(given, artifact, "values", f"1x{group}", bits, layer)
        return StreamPlan(transform, UniformQuant(bits, (1, group), clip), schedule)

    def _residual(self) -> PerStream[int]:
        def check(name: str, tokens: Any) -> None:
            check_whole(
                name, tokens, 1, "a whole number of tokens, at least 1", "; for no exact window use method 'rtn'"
            )

        return of_streams("residual", self.residual, check)

    def _group(self) -> PerStream[int]:
        def check(name: str, size: Any) -> None:
            check_whole(name, size, 1, "a whole number of tokens or channels, at least 1", "; 32 is usual")

        return of_streams("group", self.group, check)
