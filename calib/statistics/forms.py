"""The ways a stream can be quantised for which clip factors are measured: stages of the runtime, composed.

A form's name is the quantiser's group, tokens x channels (`32x1`: 32 tokens of one channel; `1x*`: a whole token), or
`fixed` (calibrated per-channel ranges, nothing measured at run time), with the transform before it, if any
(`scaled.1x32`: after `values.scale`). Going through the runtime's own stages, a calibrator measures what the runtime does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from calib.runtime.stages.codec import UniformQuant
from calib.runtime.stages.transform import ChannelRange, ChannelScale

GROUP = 32


@dataclass(frozen=True)
class Form:
    """One stream quantised in one way.

    Attributes:
        stream: `keys` or `values`.
        name: the form's name in `{stream}.clip.{name}`.
        group: tokens x channels of a group; None for calibrated ranges.
        transform: None, `range` or `scale`: the calibrated transform before the codec.
    """

    stream: str
    name: str
    group: tuple[int | None, int | None] | None
    transform: str | None = None

    def approximate(
        self, x: Tensor, bits: int, clip: float | Tensor, ranges: Mapping[str, Tensor], layer: int
    ) -> Tensor:
        """x^ = T^-1(D(E(T x))): float32, the shape of `x [batch, kv_heads, tokens, head_dim]`.

        Args:
            x: keys or values.
            bits: bits of a code.
            clip: a factor, or float32 `[kv_heads, 1, 1]`.
            ranges: the artifact's tensors, for the transforms.
            layer: the layer `x` is from.
        """
        codec = UniformQuant(bits=bits, group=self.group, clip=clip)
        transform = None
        if self.transform == "range":
            low, high = (ranges[f"{self.stream}.{end}"][layer].to(x.device) for end in ("low", "high"))
            transform = ChannelRange.between(low, high)
        elif self.transform == "scale":
            transform = ChannelScale(ranges[f"{self.stream}.scale"][layer].to(x.device)[:, None])
        y = x.float() if transform is None else transform.forward(x)
        decoded = codec.decode(codec.encode(y), x.shape[-1])
        return decoded if transform is None else transform.inverse(decoded)


def forms(head_dim: int) -> tuple[Form, ...]:
    """The forms that are measured; where 32 channels do not divide a head, groups are its largest divisor below."""
    channels = next(size for size in range(min(GROUP, head_dim), 0, -1) if head_dim % size == 0)
    return (
        Form("keys", f"{GROUP}x1", (GROUP, 1)),
        Form("keys", "1x*", (1, None)),
        Form("keys", "fixed", None, "range"),
        Form("values", f"1x{channels}", (1, channels)),
        Form("values", "1x*", (1, None)),
        Form("values", "fixed", None, "range"),
        Form("values", f"scaled.1x{channels}", (1, channels), "scale"),
    )
