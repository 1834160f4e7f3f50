"""How methods read the artifact: a clip factor, a calibrated range or channel scale for one stream of one layer."""

from typing import Any, Literal

from torch import Tensor

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.messages.printable import printable
from calib.runtime.methods.contract import check_clip
from calib.runtime.methods.per_stream import PerStream, Streams, of_streams
from calib.runtime.stages.transform import ChannelRange, ChannelScale

Statistics = Literal["prompt", "calibrated"]
STATISTICS = ("prompt", "calibrated")


def check_statistics(statistics: str, artifact: Artifact | None, method: str) -> None:
    """Raises ValueError for an unknown value of the option `statistics`, and for "calibrated" without an artifact."""
    if statistics not in STATISTICS:
        raise ValueError(f"statistics must be one of {', '.join(STATISTICS)}, got {printable(statistics)}")
    if statistics == "calibrated" and artifact is None:
        raise ValueError(
            f"method '{method}' with statistics='calibrated' needs an artifact: pass artifact=Artifact.load(...), or "
            "--artifact FILE, from `calib fit`"
        )


def clip_of_streams(clip: float | Streams[float | None] | None) -> PerStream[float | None]:
    """Returns the option `clip` of keys and of values: a factor in (0, 1], or None for the artifact's (`clip_factor`).

    Raises ValueError for a factor outside (0, 1].
    """

    def check(name: str, factor: Any) -> None:
        if factor is not None:
            check_clip(factor, name)

    return of_streams("clip", clip, check)


def clip_factor(
    clip: float | None, artifact: Artifact | None, stream: str, form: str, bits: int, layer: int
) -> float | Tensor:
    """Returns the clip factor to use: the given number, else the artifact's `[kv_heads, 1, 1]` for this form and bits, else 1.

    `form` names the quantiser's groups (tokens x channels) as the artifact does: "32x1", "1x32", "1x*", "fixed", "scaled.1x32".
    """
    if clip is not None:
        return clip
    return 1.0 if artifact is None else artifact.clip(stream, form, bits)[layer][:, None, None]


def channel_range(artifact: Artifact, stream: str, layer: int, method: str) -> ChannelRange:
    """Returns the transform that maps every channel's calibrated range (`STREAM.low`, `STREAM.high`) onto [-1, 1]."""
    low, high = (artifact.tensor(f"{stream}.{end}", wanted_by=method)[layer] for end in ("low", "high"))
    return ChannelRange.between(low, high)


def channel_scale(artifact: Artifact, layer: int, method: str) -> ChannelScale:
    """Returns the transform that divides values by their calibrated channel scale (`values.scale`; ZipCache, eq. 6)."""
    return ChannelScale(artifact.tensor("values.scale", wanted_by=method)[layer][:, None])
