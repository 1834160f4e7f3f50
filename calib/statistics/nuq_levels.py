"""Non-uniform levels (KVQuant, arXiv:2401.18079, section 3.3): k-means of normalised values, weighted by squared derivatives.

Tensors, float32, n shares of outliers: `keys.nuq.levels.BITS`, `values.nuq.levels.BITS` [layers, n, 2^BITS], BITS 2, 3 and 4.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.runtime.artifact.nuq_tensors import NUQ_BITS, levels_name
from calib.runtime.artifact.tensor_registry import STREAMS
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.token_range import TokenRange, normalised
from calib.runtime.stages.correction import Outliers
from calib.runtime.stages.transform import ChannelRange
from calib.statistics.contract import Statistic, tokens_of
from calib.statistics.nuq_ranges import NuqRanges
from calib.statistics.transformed_streams import unrotated
from calib.statistics.weighted_levels import best_levels

BINS = 1024  # of [-1, 1]


class NuqLevels(Statistic):
    """For every stream, layer and share of outliers, a histogram of normalised values: each bin's weight, and weight times value.

    The weight is the squared derivative (`calib/capture/gradients.py`) by the original entry of the key or value, not by the
    normalised one, as in the paper's released code. Keys are normalised by the ranges of `nuq_ranges.py`, values by their token's
    range as in the runtime; outliers are left out. The two buffers are float64 `[streams, layers, shares, bins]`.

    Args:
        shape: the model's sizes.
        ranges: of the keys; must be complete before the first sample.
        rotation: the model's RoPE.
    """

    reductions = {"weight": "sum", "moment": "sum"}

    def __init__(self, shape: Shape, ranges: NuqRanges, rotation: Rotation) -> None:
        super().__init__()
        self.shape, self.shares, self.rotation = shape, ranges.shares, rotation
        self.range_of: Callable[[int], tuple[Tensor, Tensor]] = ranges.of_layer
        self.made: dict[int, tuple[Tensor, Tensor]] = {}
        sizes = (len(STREAMS), shape.layers, len(self.shares), BINS)
        for name in self.reductions:
            self.register_buffer(name, torch.zeros(sizes, dtype=torch.float64))

    def observe(self, sample: LayerSample) -> None:
        """Adds a layer's keys and values, `sample.taken_at`, weighted by their derivatives, the sample's keys and values."""
        exact = sample.taken_at
        assert exact is not None, "derivatives say what they are taken at"
        keys, by_keys = (unrotated(x, sample.positions, self.rotation) for x in (exact.keys, sample.keys))
        streams = ((keys, by_keys, self._keys), (exact.values, sample.values, self._values))
        for stream, (x, derivative, normalise) in enumerate(streams):
            weight = tokens_of(derivative, sample.mask).double().square()
            for share, (y, counted) in enumerate(normalise(tokens_of(x, sample.mask), sample.layer)):
                self._add((stream, sample.layer, share), y[counted], weight[counted])

    def _add(self, at: tuple[int, int, int], y: Tensor, weight: Tensor) -> None:
        """Adds values `y [n]` and their weights to the histogram of index `at`."""
        y = y.double().clamp(-1, 1)
        bins = ((y + 1) * (BINS / 2)).long().clamp(max=BINS - 1)
        for found, added in ((self.weight[at], weight), (self.moment[at], weight * y)):
            found += torch.zeros(BINS, dtype=torch.float64, device=y.device).index_add_(0, bins, added).to(found.device)

    def _keys(self, x: Tensor, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields for each share the normalised `x [kv_heads, tokens, head_dim]`, and a bool mask of entries that are no outliers.

        Entries that are no outliers are on [-1, 1].
        """
        if layer not in self.made:
            low, high = self.range_of(layer)
            self.made[layer] = (low.to(x.device), high.to(x.device))
        for low, high in zip(*(end.unbind(-1) for end in self.made[layer]), strict=True):
            y = ChannelRange.between(low, high).forward(x)
            yield y, y.abs() <= 1

    def _values(self, x: Tensor, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the same for values `x`, each token normalised by its own range."""
        for share in self.shares:
            rest, counted = x[None], torch.ones_like(x, dtype=torch.bool)
            if share:
                outliers = Outliers(share, "channels", True, heads=self.shape.kv_heads)
                found = outliers.find(rest)
                rest, counted = outliers.filled(rest, found), outliers.cleared(torch.ones_like(rest), found)[0] > 0
            yield normalised(rest, TokenRange.parameters(rest, True))[0], counted

    def tensors(self) -> dict[str, Tensor]:
        """Returns the levels of least weighted squared error; no tensors if the model could not be differentiated at all."""
        if not bool((self.weight > 0).any()):
            return {}
        return {
            levels_name(stream, bits): torch.stack([
                torch.stack([best_levels(*one, 2**bits) for one in zip(weight, moment, strict=True)])
                for weight, moment in zip(self.weight[number].cpu(), self.moment[number].cpu(), strict=True)
            ])
            for number, stream in enumerate(STREAMS)
            for bits in NUQ_BITS
        }  # fmt: skip

    def clear(self) -> None:
        """Resets the histograms, and the ranges too: the next use computes them from the statistics at that time."""
        super().clear()
        self.made = {}
