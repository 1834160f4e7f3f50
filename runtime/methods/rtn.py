"""RTN, round to nearest: the plainest quantised cache and the floor every method is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.methods.basis import Basis, KeyBias, basis_of, check_basis, check_key_bias
from calib.runtime.methods.calibration import (
    Statistics,
    channel_range,
    check_statistics,
    clip_factor,
    clip_of_streams,
)
from calib.runtime.methods.contract import Geometry, Method, check_bits
from calib.runtime.methods.grid import Grid
from calib.runtime.methods.per_stream import Streams, of_streams
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.stages.codec import Codec, UniformQuant
from calib.runtime.stages.schedule import SlidingResidual
from calib.runtime.stages.transform import WithoutBias


@dataclass(frozen=True)
class Rtn(Method):
    """Every token of a head is one quantisation group, keys and values alike; a token is exact only in the forward that adds it.

    1. `statistics="prompt"`: each token has its own scale and zero point over the head's channels (group (1, D));
       bits + 32/D bits a value; codes of 3, 5, 6 and 7 bits do not fill 16-bit words and cost more (`kernels/pack`).
    2. `statistics="calibrated"`: the artifact holds each channel's range; no parameter is stored, `bits` a value.

    Args:
        bits: 1 ... 8 for both streams, or {keys: ..., values: ...}.
        statistics: "prompt", or "calibrated" (needs `keys.low/high` and `values.low/high`).
        clip: factor on the range in (0, 1], for both streams, or {keys: ..., values: ...}; None takes the artifact's calibrated
            one, 1 without an artifact, in another basis, or for keys with `key_bias="folded"`.
        basis: coordinates that are rounded: the channels ("none"), those of a random Hadamard rotation ("hadamard"), or of the
            artifact's rotations, as `oscar` has them ("calibrated").
        key_bias: the bias of the model's key projection is encoded as a part of every key ("kept"), or subtracted before keys are
            encoded, and its part of the logits added in attention ("folded").
    """

    name: ClassVar[str] = "rtn"
    packs: ClassVar[tuple[type[Codec], ...]] = (UniformQuant,)

    grid: ClassVar[Grid] = Grid(
        {
            "bits": (1, 2, 3, 4, 5, 6, 8),
            "statistics": ("prompt", "calibrated"),
            "clip": (None, 1.0, 0.8, 0.6),
        }
    )

    bits: int | Streams[int] = 4
    statistics: Statistics = "prompt"
    clip: float | Streams[float | None] | None = None
    basis: Basis = "none"
    key_bias: KeyBias = "kept"

    def __post_init__(self) -> None:
        of_streams("bits", self.bits, check_bits)
        clip_of_streams(self.clip)
        check_basis(self.basis, self.statistics)
        check_key_bias(self.key_bias, self.statistics)

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """Both streams, each token encoded right after the forward that added it."""
        check_statistics(self.statistics, artifact, "rtn")
        keys, values = (self._stream(stream, layer, geometry, artifact) for stream in ("keys", "values"))
        return LayerPlan(keys, values)

    def _stream(self, stream: str, layer: int, geometry: Geometry, artifact: Artifact | None) -> StreamPlan:
        bits, given = of_streams("bits", self.bits).of(stream), clip_of_streams(self.clip).of(stream)
        if self.statistics == "calibrated" and artifact is not None:
            clip = clip_factor(given, artifact, stream, "fixed", bits, layer)
            codec = UniformQuant(bits, group=None, clip=clip)
            return StreamPlan(channel_range(artifact, stream, layer, "rtn"), codec, SlidingResidual(0))
        transform = basis_of(self.basis, stream, layer, geometry, artifact, "rtn")
        measured = artifact if self.basis == "none" else None  # its clip factors are for unrotated channels
        if stream == "keys" and self.key_bias == "folded":
            transform, measured = WithoutBias(transform), None
        clip = clip_factor(given, measured, stream, "1x*", bits, layer)
        return StreamPlan(transform, UniformQuant(bits, (1, None), clip), SlidingResidual(0))
