"""Quantisation steps and errors of the components of `klt`, measured on tokens; `klt` allocates its bits by them.

Float32 tensors of the streams `keys.klt`, `values.klt` and `keys.klt.before` (`calib/runtime/artifact/transform_tensors.py`), for
L layers, H KV heads, D = head_dim: `.mean [L, H, D]`, `.basis [L, H, D, D]`, `.steps [L, H, D, 8]` for 1 ... 8 bits, `.errors
[L, H, D, 9]` for 0 ... 8 bits. If keys can be unrotated, also `.steps` and `.errors` of tokens divided by their own size (`sized`),
and the tensors of the rest of values that keys do not predict (`predicted`), whose errors are in units of that size.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.artifact.transform_tensors import PREDICTED, SIZED
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.sized import sized
from calib.runtime.stages.transform import inverse
from calib.statistics.contract import Statistic, tokens_of
from calib.statistics.transform_basis import Bases, Rest
from calib.statistics.transformed_streams import coded, streams, vectors

# Best uniform steps of 1 ... 8 bits for a Gaussian of standard deviation 1 (J. Max, Quantizing for minimum distortion, 1960), and
# the factors on them that are tried: components with heavy tails need wider steps.
GAUSSIAN = (1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
FACTORS = tuple(2 ** (third / 3) for third in range(-9, 7))
# Other text has larger values than the corpus: steps are chosen as if one token in fifty were four times as far from the mean.
# The error of 4 y with step s is 4 times the error of y with step s / 4, whose factor is 6 entries of FACTORS earlier.
# The tensor `.errors` still holds the least errors on the corpus itself.
FARTHER, SHARE, SHIFT = 4.0, 0.02, 6
# Divided by their own size, tokens are nearly Gaussian: 97 of 100 components of a real model choose a factor of 1.
SIZED_FACTORS = FACTORS[7:13]
EVERY = 3  # one token in so many is used: neighbours are similar, and each token is quantised in 128 ways


class Components(Statistic):
    """For every stream, layer, KV head, component, bit width and step factor, the squared quantisation error.

    The quantiser is that of `klt`: y^ = (clamp(round(y/s + Q/2), 0, Q) - Q/2) s, Q = 2^bits - 1. Errors are summed token by
    token, not computed from a histogram, so tails and the finest steps are exact. The buffer is float64 `[streams, layers,
    kv_heads, head_dim, 8, factors]`: 134 MB per stream for Llama 2 7B, and 50 MB for each of the three streams of sized tokens.

    Args:
        shape: the model's sizes.
        rotation: the model's RoPE; None if it cannot be unrotated.
        find: returns the bases; called when they are first needed, after the statistics that it reads are complete.
    """

    reductions = {
        "tokens": "sum",
        "energy": "sum",
        "error": "sum",
        "sized_energy": "sum",
        "sized_error": "sum",
    }

    def __init__(self, shape: Shape, rotation: Rotation | None, find: Callable[[], Bases]) -> None:
        super().__init__()
        self.rotation, self.find = rotation, find
        self.bases: Bases | None = None
        self.widths = GAUSSIAN  # steps of the bit widths that are measured, from 1 bit on; a plan measures one
        self.plain, self.sized = streams(rotation), () if rotation is None else (*SIZED, PREDICTED)
        sizes = (shape.layers, shape.kv_heads, shape.head_dim)
        self.register_buffer("tokens", torch.zeros(shape.layers, dtype=torch.int64))
        for prefix, names, factors in (("", self.plain, FACTORS), ("sized_", self.sized, SIZED_FACTORS)):
            energy = torch.zeros(len(names), *sizes, dtype=torch.float64)
            self.register_buffer(f"{prefix}energy", energy)
            self.register_buffer(f"{prefix}error", energy.new_zeros(*energy.shape, len(GAUSSIAN), len(factors)))

    def found(self) -> Bases:
        """Returns the bases, computed at the first call."""
        self.bases = self.bases or self.find()
        return self.bases

    def signature(self) -> Tensor:
        """Returns a fingerprint of the bases, float64 `[streams, L, H, D]`: errors may be summed only over equal components.

        It is T of each stream, and of the rest of predicted values, applied to one fixed vector; other components, or another
        order of them, change it.
        """
        bases = self.found()
        transform = torch.cat([bases.transform, *([bases.rest.transform[None]] if bases.rest is not None else [])])
        return transform @ torch.linspace(0.5, 1.5, transform.shape[-1], dtype=transform.dtype)

    def observe(self, sample: LayerSample) -> None:
        """Adds the errors of every third token."""
        layer, bases, device = sample.layer, self.found(), sample.keys.device
        looked_at = coded(sample) & (sample.index % EVERY == 0)
        self.tokens[layer] += looked_at.sum().to(self.tokens.device)
        measured: dict[str, tuple[Tensor, Tensor]] = {}  # components [H, n, D] by stream, and their deviations [H, D]
        centred: dict[str, Tensor] = {}
        for number, (name, x) in enumerate(zip(self.plain, vectors(sample, self.rotation), strict=True)):
            mean, transform, deviation = (
                part[number, layer].to(device, torch.float32) for part in (bases.mean, bases.transform, bases.deviation)
            )
            centred[name] = tokens_of(x, looked_at) - mean[:, None]
            measured[name] = centred[name] @ transform.mT, deviation
            y, deviation = measured[name]
            add(self.energy[number, layer], self.error[number, layer], y, deviation, FACTORS, widths=self.widths)
        if bases.rest is None:
            return
        measured[PREDICTED] = self._rest(bases, bases.rest, layer, *measured["keys.klt.before"], centred["values.klt"])
        for number, name in enumerate(self.sized):
            y, deviation = measured[SIZED.get(name, name)]
            sums, size = (self.sized_energy[number, layer], self.sized_error[number, layer]), size_of(y, deviation)
            if name == PREDICTED:  # their basis weighs errors in units of the size
                add(*sums, y / size, deviation, SIZED_FACTORS, widths=self.widths)
            else:
                add(*sums, y, deviation, SIZED_FACTORS, size, self.widths)

    @staticmethod
    def _rest(
        bases: Bases, rest: Rest, layer: int, keys: Tensor, deviation: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the components `[H, n, D]` of the values' rest, after prediction from coded keys, and their deviations `[H, D]`.

        Args:
            bases: with the keys' basis.
            rest: matrix, basis and key bits of the prediction.
            layer: of the model.
            keys: the components of keys before RoPE, `[H, n, D]`.
            deviation: their standard deviations, `[H, D]`.
            values: the values minus their mean, `[H, n, D]`.
        """
        device, bits = keys.device, rest.bits[layer]
        gaussian = torch.tensor((1.0, *GAUSSIAN), dtype=torch.float32)
        steps = (gaussian[bits].to(device) * deviation)[:, None]
        last = (2.0**bits - 1).float().to(device)[:, None]
        size = size_of(keys, deviation)
        code = (keys / size / steps).add_(last / 2).round_().clamp_(min=0)
        decoded = (torch.minimum(code, last) - last / 2) * steps * size
        of_keys = rest.transform[layer] @ rest.matrix[layer] @ inverse(bases.transform[2, layer])
        left = values @ rest.transform[layer].float().to(device).mT - decoded @ of_keys.float().to(device).mT
        return left, rest.deviation[layer].to(device, torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Returns means, bases, steps and the least errors on the corpus; components with the most variance come first.

        Errors are made non-increasing in bits: a bit that would increase the error counts as a bit without effect.
        """
        bases = self.found()
        found: dict[str, Tensor] = {}
        for number, name in enumerate(self.plain):
            # As if one token in fifty were four times as far out: see FARTHER above.
            error = self.error[number].cpu()
            feared = error[..., SHIFT:] + SHARE * FARTHER**2 * error[..., :-SHIFT]
            tables = self._steps(
                self.energy[number], error[..., SHIFT:], feared, bases.deviation[number], FACTORS[SHIFT:]
            )
            found |= {
                f"{name}.mean": bases.mean[number],
                f"{name}.basis": gathered(bases.transform[number], tables.order),
            }
            found |= {f"{name}.steps": tables.steps, f"{name}.errors": tables.errors}
        for number, name in enumerate(self.sized):
            assert bases.rest is not None
            # No such correction: a token farther out has a larger size, and so wider steps already.
            error = self.sized_error[number].cpu()
            deviation = bases.deviation[self.plain.index(SIZED[name])] if name in SIZED else bases.rest.deviation
            tables = self._steps(self.sized_energy[number], error, error, deviation, SIZED_FACTORS)
            found |= {f"{name}.steps": tables.steps, f"{name}.errors": tables.errors}
            if name == PREDICTED:
                found[f"{name}.basis"] = gathered(bases.rest.transform, tables.order)
                found[f"{name}.matrix"] = bases.rest.matrix
        return {name: tensor.float() for name, tensor in found.items()}

    def _steps(
        self, energy: Tensor, error: Tensor, feared: Tensor, deviation: Tensor, factors: Sequence[float]
    ) -> "Tables":
        """Returns a stream's steps with the least `feared` error, and the least errors on the corpus.

        `error` (on the corpus) and `feared` (with tokens farther out added) are sums, `[L, H, D, 8, factors]`.
        """
        count = self.tokens.cpu().clamp(min=1)[:, None, None]
        chosen, energy = feared.argmin(-1), energy.cpu() / count
        errors = torch.cat([energy[..., None], error.amin(-1) / count[..., None]], -1).cummin(-1).values
        grid = torch.tensor(GAUSSIAN, dtype=torch.float64)[:, None] * torch.tensor(factors, dtype=torch.float64)
        steps = deviation[..., None] * grid.gather(1, chosen.flatten(0, -2).T).T.view(chosen.shape)
        order = energy.argsort(stable=True, dim=-1, descending=True)
        return Tables(gathered(steps, order), gathered(errors, order), order)

    def clear(self) -> None:
        """Resets the sums, and the bases too: the next use computes them from the statistics at that time."""
        super().clear()
        self.bases = None


class Tables(NamedTuple):
    """A stream's `steps [L, H, D, 8]`, `errors [L, H, D, 9]`, and the `order [L, H, D]` of its components."""

    steps: Tensor
    errors: Tensor
    order: Tensor


def add(
    energy: Tensor,
    error: Tensor,
    y: Tensor,
    deviation: Tensor,
    factors: Sequence[float],
    size: Tensor | None = None,
    widths: Sequence[float] = GAUSSIAN,
) -> None:
    """Adds squares of components `y [H, n, D]` to `energy [H, D]`, and squared quantisation errors to `error [H, D, 8, factors]`.

    With `size [H, n, 1]`, y / size is quantised, and the errors are multiplied by the size.
    """
    energy += squares(y).to(energy.device)
    y = y if size is None else y / size
    for row, gaussian in enumerate(widths):
        for column, factor in enumerate(factors):
            missed = residual(y, (gaussian * factor * deviation)[:, None], row + 1)
            error[..., row, column] += squares(missed if size is None else missed.mul_(size)).to(error.device)


def residual(y: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Returns the quantisation error y^ - y."""
    last = 2**bits - 1
    code = (y / steps).add_(last / 2).round_().clamp_(0, last)
    return code.sub_(last / 2).mul_(steps).sub_(y)


def squares(y: Tensor) -> Tensor:
    """Returns the sum of squares of `y [H, n, D]` over tokens: float64 `[H, D]`."""
    return y.square().sum(1).double()


def size_of(y: Tensor, deviation: Tensor) -> Tensor:
    """Returns the sizes `[H, n, 1]` of tokens with components `y [H, n, D]`: rms of y / `deviation [H, D]`, rounded by `sized`."""
    return sized((y / deviation[:, None]).square().mean(-1, keepdim=True).sqrt())


def gathered(x: Tensor, order: Tensor) -> Tensor:
    """Returns `x [..., D, n]` with its components (axis -2) in `order [..., D]`."""
    return x.gather(-2, order[..., None].expand(x.shape))
