"""Steps and errors of the components of `klt`, measured on tokens: what its bits are dealt out by.

Tensors, of the streams `keys.klt`, `values.klt` and `keys.klt.before` (`calib/runtime/artifact/transform_tensors.py`), float32:
`.mean [L, H, D]`, `.basis [L, H, D, D]`, `.steps [L, H, D, 8]`, `.errors [L, H, D, 9]`. With keys before RoPE also
steps and errors of tokens over their own size, and all of what keys do not predict of values, whose errors are in units of that
size.
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

# Steps of 1 ... 8 bits that are best for a Gaussian of deviation 1 (J. Max, Quantizing for minimum distortion, 1960), and
# the factors on them that are tried: heavy tails want wider ones.
GAUSSIAN = (1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
FACTORS = tuple(2 ** (third / 3) for third in range(-9, 7))
# What the corpus did not have lies farther out: steps are chosen as if one token in fifty were four times as far from the
# mean. A quantiser of 4 y errs as one of y with a quarter of the step does, four times as much: six thirds of an octave.
# What a bit is worth is still told by the least error on what was seen.
FARTHER, SHARE, SHIFT = 4.0, 0.02, 6
# Over their own size tokens are nearly Gaussian: 97 of 100 components of a real model choose a factor of 1.
SIZED_FACTORS = FACTORS[7:13]
EVERY = 3  # tokens for one that is used: neighbours say much the same, and each costs 128 quantisers


class Components(Statistic):
    """For every stream, layer, KV head, component, bit width and factor the squared error of quantising.

    The quantiser is the method's: y^ = (clamp(round(y/s + L/2), 0, L) - L/2) s, L = 2^bits - 1. Errors are summed, not read
    off a histogram: tails and the finest steps are as exact as the rest. Held are float64 `[streams, layers, kv_heads,
    head_dim, 8, factors]`: 134 MB a stream for Llama 2 7B; of three streams of sized tokens 50 MB each.

    Args:
        shape: the model's sizes.
        rotation: the model's RoPE; None where it cannot be unrotated.
        find: gives the bases, asked for the first time that they are needed: all that they are made of is measured then.
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
        """The bases."""
        self.bases = self.bases or self.find()
        return self.bases

    def signature(self) -> Tensor:
        """What other bases would not give, float64 `[streams, L, H, D]`: a component's errors add up with its own alone.

        T of each stream, and of what is left of predicted values, applied to one vector: other components show, and their order.
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
            add(self.energy[number, layer], self.error[number, layer], y, deviation, self.widths, FACTORS)
        if bases.rest is None:
            return
        measured[PREDICTED] = self._rest(bases, bases.rest, layer, *measured["keys.klt.before"], centred["values.klt"])
        for number, name in enumerate(self.sized):
            y, deviation = measured[SIZED.get(name, name)]
            sums, size = (self.sized_energy[number, layer], self.sized_error[number, layer]), size_of(y, deviation)
            if name == PREDICTED:  # their basis weighs errors in units of the size
                add(*sums, y / size, deviation, self.widths, SIZED_FACTORS)
            else:
                add(*sums, y, deviation, self.widths, SIZED_FACTORS, size)

    @staticmethod
    def _rest(
        bases: Bases, rest: Rest, layer: int, keys: Tensor, deviation: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Components of what keys, coded at few bits, do not predict of values, and their deviations.

        Given are the keys' components and deviations, and the values less their mean.
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
        """Means and bases, steps, and the least errors on what was seen; components that vary most come first.

        Errors never increase with bits: where one more bit does harm, it counts as one without use.
        """
        bases = self.found()
        found: dict[str, Tensor] = {}
        for number, name in enumerate(self.plain):
            # As if one token in fifty were farther out: errors of so much narrower steps, at a larger scale.
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
            # Those that lie farther out have wider steps already.
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
        """The steps of least `feared` error, and the least of those that were seen: of a stream `[L, H, D, 8, factors]` both."""
        count = self.tokens.cpu().clamp(min=1)[:, None, None]
        chosen, energy = feared.argmin(-1), energy.cpu() / count
        errors = torch.cat([energy[..., None], error.amin(-1) / count[..., None]], -1).cummin(-1).values
        grid = torch.tensor(GAUSSIAN, dtype=torch.float64)[:, None] * torch.tensor(factors, dtype=torch.float64)
        steps = deviation[..., None] * grid.gather(1, chosen.flatten(0, -2).T).T.view(chosen.shape)
        order = energy.argsort(stable=True, dim=-1, descending=True)
        return Tables(gathered(steps, order), gathered(errors, order), order)

    def clear(self) -> None:
        """Forgets the bases as well: they are made anew of what is measured by then."""
        super().clear()
        self.bases = None


class Tables(NamedTuple):
    """Of a stream: `steps [L, H, D, 8]`, `errors [L, H, D, 9]`, and the `order [L, H, D]` of its components."""

    steps: Tensor
    errors: Tensor
    order: Tensor


def add(
    energy: Tensor,
    error: Tensor,
    y: Tensor,
    deviation: Tensor,
    widths: Sequence[float],
    factors: Sequence[float],
    size: Tensor | None = None,
) -> None:
    """Of components `y [H, n, D]` the `energy [H, D]`, and errors `[H, D, 8, factors]`; of tokens over their `size [H, n, 1]`."""
    energy += squares(y).to(energy.device)
    y = y if size is None else y / size
    for row, gaussian in enumerate(widths):
        for column, factor in enumerate(factors):
            missed = residual(y, (gaussian * factor * deviation)[:, None], row + 1)
            error[..., row, column] += squares(missed if size is None else missed.mul_(size)).to(error.device)


def residual(y: Tensor, steps: Tensor, bits: int) -> Tensor:
    """y^ - y."""
    last = 2**bits - 1
    code = (y / steps).add_(last / 2).round_().clamp_(0, last)
    return code.sub_(last / 2).mul_(steps).sub_(y)


def squares(y: Tensor) -> Tensor:
    """sum over tokens of `y [H, n, D]` squared: float64 `[H, D]`."""
    return y.square().sum(1).double()


def size_of(y: Tensor, deviation: Tensor) -> Tensor:
    """The sizes of tokens with components `y [H, n, D]` of `deviation [H, D]`: `[H, n, 1]`."""
    return sized((y / deviation[:, None]).square().mean(-1, keepdim=True).sqrt())


def gathered(x: Tensor, order: Tensor) -> Tensor:
    """`x [..., D, n]` with its components in `order [..., D]`."""
    return x.gather(-2, order[..., None].expand(x.shape))
