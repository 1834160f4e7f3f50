"""A row of one layer under GEAR in float64: which tokens are a segment, and attention over what is left of each."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gear.oracle import Segment, Spec, encode_segment
from importance.layer import LayerOracle


class GearLayer(LayerOracle):
    """Segments that are encoded once, when their last token has come; all other tokens are exact.

    `segments` are those encoded so far, keys and values; `doubts` counts what float32 may have rounded otherwise in them.
    `slack [heads, n]` is how far the last outputs move, as independent errors, where stored numbers are rounded to their
    other neighbours; `dtype` is what encoding computes in; attention is in float64 always.
    """

    def __init__(
        self,
        spec: Spec,
        layer: int = 0,
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
        dtype: type = np.float64,
    ) -> None:
        """`statistics` of "keys" and "values": calibrated `thresholds`, `basis` or both, as `encode_segment` takes them."""
        super().__init__([spec.bits])
        self.spec, self.layer, self.dtype = spec, layer, dtype
        self.statistics = statistics or {"keys": {}, "values": {}}
        self.segments: list[tuple[Segment, Segment]] = []
        self.encoded = 0
        self.units = [np.zeros(0), np.zeros(0)]

    @property
    def doubts(self) -> int:
        """Codes and parameters of all segments that lie on a border."""
        return sum(part.doubts for both in self.segments for part in both)

    def size(self) -> int:
        """Tokens of the segment that comes next."""
        if self.encoded:
            return self.spec.block
        grain = self.spec.of_stream("keys").group if self.spec.backbone == "kivi" else 1
        return max(self.prompt // grain * grain, self.spec.block)

    def attend(self, query: np.ndarray, before: int) -> np.ndarray:
        """Also what the stored numbers' rounding can do to each output: of keys through the logits, of values as they are."""
        weights = super().attend(query, before)
        new = ((0, 0), (0, self.length - self.units[0].shape[1]), (0, 0)) if before else None
        self.units = [np.pad(unit, new) if new else np.zeros_like(self.keys) for unit in self.units]
        keys, values = (unit.repeat(self.group, 0) for unit in self.units)
        tokens = self.values.repeat(self.group, 0)
        # |v - o|, the largest over the channels: what moving weight to or from a token is worth.
        away = abs(tokens[:, None] - (weights @ tokens)[:, :, None]).max(-1)
        # A factor of a channel is shared by a segment's tokens, so that errors add up over tokens, and not over channels.
        through = np.linalg.norm((weights * away) @ keys * query, axis=-1) / np.sqrt(query.shape[2])
        self.slack = np.hypot(through, (weights @ values).max(-1))
        return weights

    def store(self, before: int) -> None:
        """Encodes every segment whose last token has come."""
        while (stop := self.encoded + self.size()) <= self.length:
            span, both = slice(self.encoded, stop), []
            for stream, tokens in (("keys", self.keys), ("values", self.values)):
                first, known = not self.encoded, self.statistics[stream]
                segment = encode_segment(
                    tokens[:, span], self.spec, stream, self.layer, first, **known, dtype=self.dtype
                )
                tokens[:, span] = segment.approximation
                self.units[len(both)][:, span] = segment.unit
                both.append(segment)
            self.segments.append((both[0], both[1]))
            self.tier[:, span] = 0
            self.encoded = stop
