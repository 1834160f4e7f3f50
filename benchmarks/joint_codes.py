"""Codes of keys and values with joint bases of heads and prediction between layers, without packing, for `storage_profile.py`.

A layer's keys before RoPE, and its values, are coded as in `calib/statistics/joint_codes.py`, in forms of increasing dependence:

    heads              a basis and a size for each head; values are predicted from their own head's keys, as `klt` does
    joint              a basis and a size for all heads of a layer
    joint, layer       and values are predicted from the keys of all heads
    joint, two layers  and keys and values also from the keys and values of the layer before

Codes are fitted layer by layer on vectors decoded at the given price of a bit (closed loop), so each form is fitted for one budget
alone. A component takes any width from 0 to 8 bits; a token's bits are the sum of widths, and four for each size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.statistics.joint_codes import JointCodes, price_of


@dataclass(frozen=True)
class Form:
    """A form: with `joint` bases, values predicted from all heads of the `layer`, and prediction from the `previous` layer."""

    name: str
    joint: bool = False
    layer: bool = False
    previous: bool = False


FORMS = (
    Form("heads"),
    Form("joint", joint=True),
    Form("joint, layer", joint=True, layer=True),
    Form("joint, two layers", joint=True, layer=True, previous=True),
)

Made = Callable[[int, int, Tensor, Tensor], JointCodes]


@dataclass(frozen=True)
class Codes:
    """The codes of all layers in one `form`: `streams` has those of keys and of values, by layer."""

    form: Form
    streams: tuple[tuple[JointCodes, JointCodes], ...]

    @classmethod
    def fitted(cls, form: Form, tokens: Tensor, weights: Tensor, price: float) -> "Codes":
        """Fits codes to `tokens [layers, 2, n, width]`, keys before RoPE and values, with `weights [layers, 2, heads, D, D]`."""
        streams = list[JointCodes]()

        def made(layer: int, stream: int, x: Tensor, known: Tensor) -> JointCodes:
            weight = weights[layer, stream]
            blocks = len(weight) if stream and not form.layer else 1
            weight = torch.block_diag(*weight)[None] if form.joint else weight
            streams.append(JointCodes.fitted(x, known, weight, price, blocks))
            return streams[-1]

        closed_loop(form, tokens, made)
        return cls(form, tuple(zip(streams[::2], streams[1::2], strict=True)))

    def at(self, price: float) -> "Codes":
        """Returns the same codes with the widths for another price of a bit."""
        return replace(self, streams=tuple((keys.at(price), values.at(price)) for keys, values in self.streams))

    def price(self, bits: float) -> float:
        """Returns the price of a bit at which the codes take at most `bits` per value."""
        return price_of([own for both in self.streams for own in both], bits * self.values)

    @property
    def values(self) -> int:
        """Number of key and value elements of a token."""
        return sum(own.mean.numel() for both in self.streams for own in both)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's codes in all layers, rounded up."""
        return -(-sum(own.bits for both in self.streams for own in both) // 8)

    def decoded(self, tokens: Tensor) -> Tensor:
        """Returns the decoded `tokens [layers, 2, n, width]`."""
        return closed_loop(self.form, tokens, lambda layer, stream, *_: self.streams[layer][stream])


def closed_loop(form: Form, tokens: Tensor, codes: Made) -> Tensor:
    """Returns the decoded `tokens [layers, 2, n, width]`, layer by layer, each predicted from vectors decoded before.

    `codes(layer, stream, x, known)` returns the code of one stream (0 keys, 1 values), given the vectors decoded before.
    """
    found, before = [], tokens[0, 0, :, :0]
    for layer, (x, given) in enumerate(tokens):
        known = before if form.previous else before[:, :0]
        keys = codes(layer, 0, x, known)
        of_keys = keys.decoded(x, known)
        known = torch.cat([of_keys, known], -1)
        values = codes(layer, 1, given, known)
        before = torch.cat([of_keys, values.decoded(given, known)], -1)
        found.append(torch.stack([before[:, : x.shape[-1]] + keys.mean, before[:, x.shape[-1] :] + values.mean]))
    return torch.stack(found)
