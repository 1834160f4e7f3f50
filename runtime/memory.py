"""The memory of a cache: predicted from shapes, and measured by walking every tensor it holds.

Both are counted by kind. `bits_per_value` is everything on the device divided by the number of key and value elements
of the real tokens seen; `marginal_bits` is what one more token will add once the window is full. Ratios are to what
transformers' `DynamicCache` holds for the same tokens in the model's dtype (`dynamic_bytes`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

# The lines of the report: packed codes, their parameters, their corrections (outliers, low rank, residual), the rows' own
# dictionary atoms, exact pages, the exact window, pairs fetched from the host, representative keys, positions of tokens in
# tiers, saliency, tables of the artifact and of pages, uncompressed layers.
KINDS = (
    *("codes", "parameters", "outliers", "low_rank", "residual", "dictionary", "exact", "window"),
    *("fetched", "representatives", "positions", "saliency", "tables", "uncompressed"),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one cache at one moment.

    Attributes:
        predicted_bytes: computed from the shapes of what is stored.
        measured_bytes: storage of every tensor on the device (on the CPU, of every tensor not counted in `host_bytes`).
        host_bytes: storage of tensors placed in host memory on purpose.
        by_kind: predicted bytes of each of `KINDS`.
        bits_per_value: measured bits for each key or value element of the tokens seen; 0 for an empty cache.
        marginal_bits: bits that one more token adds for each of its key and value elements, once the window is full.
        dynamic_bytes: what a `DynamicCache` of the model's dtype holds for the same tokens without padding; a sliding layer
            counts with the tokens that it keeps.
        tokens: real tokens stored, of all rows together.
        encoded_tokens: how many of them have left the exact window.
        compressed_layers: attention layers that are compressed; the others slide or have states, and stay as transformers
            makes them.
        layers: layers in all.
        overflowed_outliers: entries beyond an artifact's outlier thresholds that found no slot, and are quantised like others.
    """

    predicted_bytes: int
    measured_bytes: int
    host_bytes: int
    by_kind: dict[str, int]
    bits_per_value: float
    marginal_bits: float
    compressed_layers: int
    layers: int
    dynamic_bytes: int = 0
    tokens: int = 0
    encoded_tokens: int = 0
    overflowed_outliers: int = 0

    @property
    def nothing_encoded(self) -> bool:
        """Whether every token is still exact in the window, so that the bytes say nothing about the method."""
        return self.tokens > 0 and not self.encoded_tokens

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {size:,}" for kind, size in self.by_kind.items() if size)
        return (
            f"{self.measured_bytes:,} bytes measured ({self.predicted_bytes:,} predicted), {self._beside_dynamic()}, "
            f"{self.marginal_bits:.2f} marginal bits [{kinds}]"
            f"{f'; {self.host_bytes:,} bytes in host memory' if self.host_bytes else ''}"
            f"{'' if self.compressed_layers == self.layers else self._share()}"
            f"{f'; {self.overflowed_outliers:,} outliers found no slot' if self.overflowed_outliers else ''}"
        )

    def _beside_dynamic(self) -> str:
        if self.nothing_encoded:
            return f"DynamicCache would hold {self.dynamic_bytes:,}; {nothing_encoded(self.tokens)}"
        share = (
            f"{100 * self.measured_bytes / self.dynamic_bytes:.1f} % of DynamicCache's {self.dynamic_bytes:,}, "
            if self.tokens
            else ""
        )
        return f"{share}{self.bits_per_value:.2f} bits per value"

    def _share(self) -> str:
        return f"; {self.compressed_layers} of {self.layers} layers are compressed, the others stay as transformers keeps them"


def nothing_encoded(tokens: int) -> str:
    """The text that reports a cache of `tokens` tokens of which none has left the exact window."""
    return f"nothing is encoded yet (all {tokens:,} tokens are exact in the window)"


def measure(holder: Any, device: torch.device | None = None) -> int:
    """Bytes of the distinct storages behind every tensor reachable from `holder`; of those on `device` where one is given."""
    found = [tensor for tensor in tensors(holder) if device is None or tensor.device == device]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}.values())


def tensors(holder: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor reachable through containers, dataclasses and attributes; models are not entered.

    Tensor subclasses that wrap other tensors, such as quanto's, yield those.
    """
    seen = set() if seen is None else seen
    if id(holder) in seen or isinstance(holder, torch.nn.Module):
        return
    seen.add(id(holder))
    flatten = getattr(holder, "__tensor_flatten__", None)
    if isinstance(holder, Tensor) and flatten is None:
        yield holder
        return
    if isinstance(holder, Tensor) and flatten is not None:
        parts = [getattr(holder, name) for name in flatten()[0]]
    elif isinstance(holder, dict):
        parts = list(holder.values())
    elif isinstance(holder, list | tuple | set):
        parts = list(holder)
    elif is_dataclass(holder) and not isinstance(holder, type):
        parts = [getattr(holder, f.name) for f in fields(holder)]
    else:
        parts = list(getattr(holder, "__dict__", {}).values())
    for part in parts:
        yield from tensors(part, seen)
