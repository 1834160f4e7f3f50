"""Forms: the combinations of transform and uniform quantiser for which clip factors are measured.

A form's name is the quantiser's group, tokens x channels (`32x1`: 32 tokens of one channel; `1x*`: all channels of one token),
or `fixed` (calibrated per-channel ranges; nothing is measured at run time), with the transform before it, if any
(`scaled.1x32`: after division by `values.scale`). Forms use the runtime's own stages, so the measured error is the runtime's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.quantise.reference import as_stored, between, extremes, rounded
from calib.runtime.stages.codec import UniformQuant
from calib.runtime.stages.contract import Transform
from calib.runtime.stages.transform import ChannelRange, ChannelScale, Identity

GROUP = 32


@dataclass(frozen=True)
class Form:
    """A way of quantising keys or values.

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
        """Returns x^ = T^-1(D(E(T x))), with transform T, encoder E, decoder D: float32, the shape of `x`.

        Args:
            x: keys or values, `[batch, kv_heads, tokens, head_dim]`.
            bits: bits of a code.
            clip: a clip factor, or float32 `[kv_heads, 1, 1]`.
            ranges: the artifact's tensors, for the transforms.
            layer: the layer of `x`.
        """
        codec, transform = UniformQuant(bits=bits, group=self.group, clip=clip), self.stage(ranges, layer, x.device)
        return transform.inverse(codec.decode(codec.encode(transform.forward(x)), x.shape[-1]))

    def stage(self, ranges: Mapping[str, Tensor], layer: int, device: torch.device) -> Transform:
        """Returns the transform before the codec, from the tensors `{stream}.low`, `.high` or `.scale` in `ranges`."""
        if self.transform == "range":
            low, high = (ranges[f"{self.stream}.{end}"][layer].to(device) for end in ("low", "high"))
            return ChannelRange.between(low, high)
        if self.transform == "scale":
            return ChannelScale(ranges[f"{self.stream}.scale"][layer].to(device)[:, None])
        return Identity()


class Candidates:
    """Computes `Form.approximate`, bit for bit, for many bit widths and clip factors on the same keys or values.

    The transform and the extremes of every group are computed once; codes are not packed.
    """

    def __init__(self, form: Form, x: Tensor, ranges: Mapping[str, Tensor], layer: int) -> None:
        """Transforms `x [batch, kv_heads, tokens, head_dim]`; arguments as in `Form.approximate`."""
        self.form, self.transform = form, form.stage(ranges, layer, x.device)
        self.y = self.transform.forward(x).contiguous()
        self.room = torch.empty_like(self.y)
        tokens, channels = form.group or (None, None)
        self.group = (tokens or x.shape[-2], channels or x.shape[-1])
        self.extremes = None if form.group is None else extremes(self.y, self.group)
        self.largest = self.y.abs().amax()

    def at(self, bits: int, clip: float) -> Tensor:
        """Returns x^, float32, the shape of x; the next call may overwrite it."""
        codec = UniformQuant(bits=bits, group=self.form.group, clip=clip)
        if self.extremes is None:
            parameters = torch.cat(codec.fixed(self.y), -1)
        else:
            wide = codec.fp32_params(self.largest)
            parameters = as_stored(between(*self.extremes, bits, clip), torch.float32 if wide else torch.float16)
        return self.transform.inverse(rounded(self.y, parameters, self.group, bits, self.room))


def forms(head_dim: int) -> tuple[Form, ...]:
    """Returns the forms that are measured; groups of channels have the largest divisor of `head_dim` that is at most 32."""
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
