"""The relative error of the attention output on held-out text, with keys and values both quantised.

It gives no tensor of the artifact, only figures for its provenance and the fit's table. Three settings at each bit width; ranges,
if measured on the text, are those of groups of 32 tokens (keys) or 32 channels (values):

- `prompt`: ranges measured on the running text, clip 1 (KIVI);
- `clipped`: the same with the calibrated clip factors;
- `calibrated`: keys with calibrated ranges, which store no parameters; values divided by their calibrated channel scale; clip
  factors for both (`kivi` with `statistics="calibrated"`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.statistics.attention_error import Reference
from calib.statistics.contract import Statistic
from calib.statistics.forms import Form, forms

SETTINGS = ("prompt", "clipped", "calibrated")


class HeldoutError(Statistic):
    """sqrt(sum |o - o^|^2 / sum |o|^2) of attention outputs o, per layer, setting and bit width.

    Args:
        shape: the model's sizes.
        bits: bit widths for which clip factors were measured.
        rows: query rows used in each sequence.

    `fitted` must hold the artifact's tensors before `observe`.
    """

    reductions = {"error": "sum", "energy": "sum"}

    def __init__(self, shape: Shape, bits: Sequence[int], rows: int) -> None:
        super().__init__()
        self.bits, self.rows = tuple(bits), rows
        self.fitted: Mapping[str, Tensor] = {}
        by_stream = [[form for form in forms(shape.head_dim) if form.stream == stream] for stream in ("keys", "values")]
        self.measured: tuple[Form, ...] = tuple(one[0] for one in by_stream)
        wanted = ("range", "scale")
        self.calibrated: tuple[Form, ...] = tuple(
            next(form for form in one if form.transform == kind) for one, kind in zip(by_stream, wanted, strict=True)
        )
        self.register_buffer("error", torch.zeros(shape.layers, len(SETTINGS), len(self.bits), dtype=torch.float64))
        self.register_buffer("energy", torch.zeros(shape.layers, dtype=torch.float64))

    def observe(self, sample: LayerSample) -> None:
        """Adds the layer's errors."""
        for part in sample.without_padding():
            reference = Reference.of(part, self.rows)
            self.energy[sample.layer] += reference.energy().sum().to(self.energy.device)
            for row, setting in enumerate(SETTINGS):
                for column, bits in enumerate(self.bits):
                    streams = {
                        form.stream: self.approximate(form, reference, setting, bits, sample.layer)
                        for form in (self.calibrated if setting == "calibrated" else self.measured)
                    }
                    error = reference.error(**streams).sum()
                    self.error[sample.layer, row, column] += error.to(self.error.device)

    def approximate(self, form: Form, reference: Reference, setting: str, bits: int, layer: int) -> Tensor:
        """Returns one stream of the sample, quantised and dequantised as in the setting."""
        x = getattr(reference, form.stream)
        clip: float | Tensor = 1.0
        if setting != "prompt":
            factors = self.fitted[f"{form.stream}.clip.{form.name}"][layer, :, self.bits.index(bits)]
            clip = factors.to(x.device)[:, None, None]
        return form.approximate(x, bits, clip, self.fitted, layer)

    def tensors(self) -> dict[str, Tensor]:
        """Returns no tensors."""
        return {}

    def relative(self) -> Tensor:
        """Returns the relative errors by layer: float64 `[layers, settings, bits]`; 0 in layers without samples."""
        return (self.error / self.energy.clamp(min=torch.finfo(torch.float64).tiny)[:, None, None]).sqrt().cpu()

    def overall(self) -> Tensor:
        """Returns the relative errors over all layers together: float64 `[settings, bits]`."""
        return (self.error.sum(0) / self.energy.sum().clamp(min=torch.finfo(torch.float64).tiny)).sqrt().cpu()

    def named(self, errors: Tensor) -> dict[str, float]:
        """Returns the entries of `errors [settings, bits]` by names such as `error_4bit_prompt`."""
        return {
            f"error_{width}bit_{setting}": float(errors[row, column])
            for row, setting in enumerate(SETTINGS)
            for column, width in enumerate(self.bits)
        }
