"""The tensors an artifact is known to hold: names, shapes, allowed values, and who measures them.

L layers, H KV heads, D head_dim; float32 throughout. `docs/artifact_format.md` says the same in prose. Names that are
not here may be present: they come from calibrators this version does not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, float32

from calib.runtime.artifact_error import FIT_AGAIN, ArtifactError

STREAMS = ("keys", "values")


@dataclass(frozen=True)
class PerChannel:
    """One registered [L, H, D] tensor: the calibrator that measures it and the values it may take."""

    calibrator: str
    above: float | None = None  # every entry is greater than this
    at_least: float | None = None


PER_CHANNEL: Mapping[str, PerChannel] = {
    "keys.low": PerChannel("channel_range"),  # least key of the channel after RoPE
    "keys.high": PerChannel("channel_range"),
    "values.low": PerChannel("channel_range"),
    "values.high": PerChannel("channel_range"),
    "values.scale": PerChannel("channel_scale", above=0),  # sqrt(max_t |v|), ZipCache (arXiv:2405.14256) eq. 6
    "keys.balancer": PerChannel("balancer", above=0),  # sqrt(max_t |q| / max_t |k|), MiKV (arXiv:2402.18096) eq. 2-4
    "queries.mean_square": PerChannel("query_energy", at_least=0),  # mean of q^2 over tokens and query heads
}


def clip_form(name: str) -> tuple[str, str] | None:
    """The stream and the form of a clip tensor's name (`keys.clip.32x1` -> `("keys", "32x1")`), else None."""
    stream, _, rest = name.partition(".clip.")
    return (stream, rest) if stream in STREAMS and rest else None


def calibrator_of(name: str) -> str | None:
    """The `calib fit` calibrator that measures tensor `name`, or None for a name that is not registered."""
    if clip_form(name):
        return "clip"
    return PER_CHANNEL[name].calibrator if name in PER_CHANNEL else None


def check_registered(
    tensors: Mapping[str, Tensor], layers: int, kv_heads: int, head_dim: int, clip_bits: Sequence[int]
) -> None:
    """Raises `ArtifactError` where a registered tensor has not the shape, dtype or values its name promises."""
    for name, tensor in tensors.items():
        if name in PER_CHANNEL:
            check_shape(name, tensor, [layers, kv_heads, head_dim], "[layers, kv_heads, head_dim]")
            check_values(name, tensor, PER_CHANNEL[name].above, PER_CHANNEL[name].at_least)
        elif clip_form(name):
            if not clip_bits:
                raise ArtifactError(
                    f"tensor {name!r} is present and clip_bits is empty, expected a width for each entry"
                )
            check_shape(name, tensor, [layers, kv_heads, len(clip_bits)], "[layers, kv_heads, len(clip_bits)]")
            check_values(name, tensor, above=0, at_most=1)
    for stream in STREAMS:
        low, high = tensors.get(f"{stream}.low"), tensors.get(f"{stream}.high")
        if low is not None and high is not None and bool((low > high).any()):
            layer, head, channel = (low > high).nonzero()[0].tolist()
            raise ArtifactError(
                f"tensor '{stream}.low' is above '{stream}.high' at layer {layer}, head {head}, channel {channel}, "
                f"expected a range; {FIT_AGAIN}"
            )


def check_shape(name: str, tensor: Tensor, expected: list[int], axes: str) -> None:
    if list(tensor.shape) != expected or tensor.dtype != float32:
        raise ArtifactError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected {float32} {expected} = {axes} "
            f"of the fingerprint; {FIT_AGAIN}"
        )


def check_values(
    name: str, tensor: Tensor, above: float | None = None, at_least: float | None = None, at_most: float | None = None
) -> None:
    if tensor.numel() == 0:
        return
    least, most = tensor.min().item(), tensor.max().item()
    broken = [
        *([f"above {above}"] if above is not None and least <= above else []),
        *([f"at least {at_least}"] if at_least is not None and least < at_least else []),
        *([f"at most {at_most}"] if at_most is not None and most > at_most else []),
    ]
    if broken:
        raise ArtifactError(
            f"tensor {name!r} has values from {least:.6g} to {most:.6g}, expected {' and '.join(broken)}; {FIT_AGAIN}"
        )
