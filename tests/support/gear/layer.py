"""Float64 oracle of one row of one layer under GEAR: which tokens form a segment, and attention over the decoded segments."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gear.oracle import Segment, Spec, encode_segment
from importance.layer import LayerOracle


class GearLayer(LayerOracle):
    """A row whose tokens are encoded segment by segment, when a segment's last token is there; all other tokens are exact.

    `segments` are the encoded keys and values so far; `doubts` counts their numbers that float32 may round to another neighbour.
    `slack [heads, n]` is the change of the last outputs if every stored number were rounded to its other neighbour, as independent
    errors. Encoding computes in `dtype`, attention always in float64.
    """

    def __init__(
        self,
        spec: Spec,
        layer: int = 0,
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
        dtype: type = np.float64,
    ) -> None:
        """`statistics["keys"]` and `["values"]` may have calibrated `thresholds` and a `basis`, as `encode_segment` takes them."""
        super().__init__([spec.bits])
        self.spec, self.layer, self.dtype = spec, layer, dtype
        self.statistics = statistics or {"keys": {}, "values": {}}
        self.segments: list[tuple[Segment, Segment]] = []
        self.encoded = 0
        self.units = [np.zeros(0), np.zeros(0)]

    @property
    def doubts(self) -> int:
        """Number of codes and parameters of all segments that float32 may round differently."""
        return sum(part.doubts for both in self.segments for part in both)

    def size(self) -> int:
        """Number of tokens of the next segment."""
        if self.encoded:
            return self.spec.block
        grain = self.spec.of_stream("keys").group if self.spec.backbone == "kivi" else 1
        return max(self.prompt // grain * grain, self.spec.block)

    def attend(self, query: np.ndarray, before: int) -> np.ndarray:
        """Attention as in `LayerOracle`; also sets `slack` from the rounding of stored keys (through logits) and values."""
        weights = super().attend(query, before)
        new = ((0, 0), (0, self.length - self.units[0].shape[1]), (0, 0)) if before else None
        self.units = [np.pad(unit, new) if new else np.zeros_like(self.keys) for unit in self.units]
        keys, values = (unit.repeat(self.group, 0) for unit in self.units)
        tokens = self.values.repeat(self.group, 0)
        # max over channels of |v - o|: the change of the output for a change of a token's weight.
        away = abs(tokens[:, None] - (weights @ tokens)[:, :, None]).max(-1)
        # A channel's factor is shared by the tokens of a segment, so its error adds up over tokens; those of channels are
        # independent.
        through = np.linalg.norm((weights * away) @ keys * query, axis=-1) / np.sqrt(query.shape[2])
        self.slack = np.hypot(through, (weights @ values).max(-1))
        return weights

    def store(self, before: int) -> None:
        """Encode every segment whose last token is there."""
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
