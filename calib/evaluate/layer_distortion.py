"""Errors of a layer's decoded keys and values, compared with the least error that their bit rate allows.

x is a key k or value v, x^ its decoded value, q a query, D = head_dim. There are three errors for each layer, each relative to a
mean square:

- keys, values: E|x - x^|^2 / E|x|^2;
- logits: E[(q . (k - k^))^2] / E[(q . k)^2], every query with every key: the keys' error weighted by the queries.

Bounds (`rate_distortion`) use the covariance of all tokens; errors and rates use the tokens in pages. Sums are float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.evaluate.rate_distortion import decibels, least_bits, least_error, spectrum
from calib.evaluate.stored import Stored

ERRORS = ("keys", "logits", "values")


@dataclass(frozen=True)
class StreamSums:
    """Sums over the keys or the values of one layer.

    Attributes:
        tokens: number of all tokens, encoded or not, of each KV head.
        total: the sum of their exact x `[kv_heads, D]`.
        square: the sum of x x^T `[kv_heads, D, D]`.
        encoded: number of encoded tokens of each KV head.
        error: the sum of (x - x^) (x - x^)^T over the encoded tokens `[kv_heads, D, D]`.
        bits: bits of the encoded tokens, all KV heads together.
    """

    tokens: int
    total: Tensor
    square: Tensor
    encoded: int
    error: Tensor
    bits: float

    def __add__(self, other: "StreamSums") -> "StreamSums":
        return StreamSums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def rate(self) -> float:
        """Bits per value of the encoded tokens; 0 if there are none."""
        return self.bits / (self.encoded * self.total.numel()) if self.encoded else 0.0

    def covariance(self) -> Tensor:
        """Covariance of the exact x of all tokens about their mean: `[kv_heads, D, D]`."""
        mean = self.total / self.tokens
        return self.square / self.tokens - mean[:, :, None] * mean[:, None, :]


@dataclass(frozen=True)
class LayerSums:
    """Sums over one layer.

    Attributes:
        keys: sums over the keys.
        values: sums over the values.
        queries: the sum of q q^T over the queries of each KV head's group `[kv_heads, D, D]`.
        asked: number of those queries for each KV head.
        kept: sum over rows of the share of its tokens that a row has kept.
        rows: number of rows.
    """

    keys: StreamSums
    values: StreamSums
    queries: Tensor
    asked: int
    kept: float
    rows: int

    def __add__(self, other: "LayerSums") -> "LayerSums":
        return LayerSums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Distance:
    """One kind of error of one layer, and its bound.

    Attributes:
        error: the relative error in dB.
        bound: the least relative error at the same rate, in dB.
        excess: bits per value beyond those that a code at the bound needs for the same error.
    """

    error: float
    bound: float
    excess: float

    @property
    def distance(self) -> float:
        """dB above the bound."""
        return self.error - self.bound


def layer_sums(sample: LayerSample, held: list[dict[str, Stored]], bits: dict[str, float], kept: float) -> LayerSums:
    """Computes the sums of one layer's sample, which has no padding.

    Args:
        sample: exact queries, keys and values of the layer.
        held: for each row, the decoded tokens of both streams; empty if nothing is encoded, then there are no errors.
        bits: bits of the encoded tokens of all rows, by stream.
        kept: sum over rows of the share of its tokens that a row has kept.
    """

    def of(role: str) -> StreamSums:
        given = getattr(sample, role)
        found = [(exact, row[role]) for exact, row in zip(given, held, strict=True)] if held else []
        return stream_sums(given, found, bits[role])

    grouped = sample.queries.double().unflatten(1, (sample.keys.shape[1], -1)).transpose(0, 1).flatten(1, 3)
    return LayerSums(of("keys"), of("values"), products(grouped), grouped.shape[1], kept, len(sample.keys))


def stream_sums(given: Tensor, held: list[tuple[Tensor, Stored]], bits: float) -> StreamSums:
    """Computes the sums over `given [rows, kv_heads, T, D]`; `held` pairs a row of it with the row's stored tokens."""
    flat = given.double().transpose(0, 1).flatten(1, 2)
    error, encoded = torch.zeros(flat.shape[0], flat.shape[2], flat.shape[2], dtype=torch.float64), 0
    for exact, stored in held:
        positions = stored.positions.to(given.device)[..., None].expand(stored.tokens.shape)
        error += products(exact.double().gather(1, positions) - stored.tokens.to(given.device).double())
        encoded += stored.tokens.shape[1]
    return StreamSums(flat.shape[1], flat.sum(1).cpu(), products(flat), encoded, error, bits)


def products(x: Tensor) -> Tensor:
    """Returns the sum of x x^T over the n vectors of `x [kv_heads, n, D]`: `[kv_heads, D, D]` on the CPU."""
    return (x.mT @ x).cpu()


def distances(sums: LayerSums) -> Iterator[tuple[str, Distance]]:
    """Yields (kind, distance) for each of `ERRORS`; a stream that is exact or not encoded has none."""
    for kind in ERRORS:
        stream = sums.values if kind == "values" else sums.keys
        weight = sums.queries / sums.asked if kind == "logits" else None
        found = stream_distance(stream, weight)
        if found is not None:
            yield kind, found


def stream_distance(stream: StreamSums, weight: Tensor | None) -> Distance | None:
    """Returns error and bound of one stream; with a `weight` W `[kv_heads, D, D]` the squared error of e is e^T W e.

    None if nothing is encoded, if the error is 0, or if the bound is 0, as for tokens that are all equal.
    """
    if not stream.encoded:
        return None
    error = mean_square(stream.error / stream.encoded, weight)
    energy = mean_square(stream.square / stream.tokens, weight)
    variances = spectrum(stream.covariance(), weight)
    bound = least_error(variances, stream.rate)
    if error <= 0 or bound <= 0:
        return None
    return Distance(decibels(error / energy), decibels(bound / energy), stream.rate - least_bits(variances, error))


def mean_square(products: Tensor, weight: Tensor | None) -> float:
    """Returns E[x^T W x] per value from `products` = E[x x^T] `[kv_heads, D, D]`; without a weight W, E|x|^2 per value."""
    traces = products.diagonal(dim1=-2, dim2=-1) if weight is None else (products * weight).sum(-1)
    return float(traces.mean())
