"""Shapes of a stream's tensors: KV heads and channels are known when its graph is built, batch and tokens are not."""

from typing import NamedTuple

from calib.export.onnx.graph import Value


class Field(NamedTuple):
    """A named tensor of encoded tokens, as in the runtime: a row of `width` numbers for every `tokens_per_row` tokens and each of
    `heads` heads; with None one row for a whole segment. A string as width means that it depends on the segment."""

    dtype: type
    heads: int
    tokens_per_row: int | None
    width: int | str

    def shape(self, prefix: str = "") -> tuple[int | str, ...]:
        """Returns `[batch, heads, rows, width]`; `prefix` makes the names of unknown lengths different between tiers."""
        each = self.tokens_per_row
        rows = 1 if each is None else f"{prefix}tokens" if each == 1 else f"{prefix}tokens/{each}"
        return ("batch", self.heads, rows, self.width if isinstance(self.width, int) else prefix + self.width)


Fields = dict[str, Field]


class Shape(NamedTuple):
    """KV heads and channels of a head."""

    heads: int
    channels: int

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.channels

    def merged(self, x: Value) -> Value:
        """Returns `[batch, kv_heads, T, D]` as `[batch, 1, T, kv_heads D]`."""
        return x.permute(0, 2, 1, 3).reshape(0, 1, -1, self.width)

    def apart(self, x: Value) -> Value:
        """Undoes `merged`."""
        return x.reshape(0, -1, self.heads, self.channels).permute(0, 2, 1, 3)
