"""Codes of a basis' components, in words of all heads side by side: the counterpart of `kernels/pack/heads.py` and
`runtime/stages/codec/mixed.py`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from calib.export.onnx.graph import Value
from calib.export.onnx.packing import pack, unpack
from calib.export.onnx.shape import Field, Fields, Shape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WordCodesWriter(ABC):
    """Writer of the field `words` for every token; its input y has the components of a basis, not channels."""

    codec: Any
    shape: Shape
    fp32_params: bool

    def fields(self) -> Fields:
        """Returns the field of the words of all heads."""
        return {"words": Field(np.int16, 1, 1, sum(self.codec.counts))}

    def encode(self, y: Value) -> dict[str, Value]:
        """Returns the fields of y, float32 `[batch, kv_heads, tokens, components]`."""
        most, heads = max(self.codec.counts), len(self.codec.counts)
        words = pack(self.stored(y), self.codec.widths, self.codec.components)
        own = [head * most + word for head, count in enumerate(self.codec.counts) for word in range(count)]
        return {"words": words.permute(0, 2, 1, 3).reshape(0, 1, -1, heads * most).entries(3, own)}

    def numbers(self, block: dict[str, Value]) -> Value:
        """Returns the levels' numbers, float32 `[batch, kv_heads, tokens, components]`; arbitrary for components without a word."""
        most, heads, last = max(self.codec.counts), len(self.codec.counts), sum(self.codec.counts) - 1
        begins = [0, *accumulate(self.codec.counts)][:heads]
        positions = [min(begin + word, last) for begin in begins for word in range(most)]
        words = block["words"].entries(3, positions).reshape(0, -1, heads, most).permute(0, 2, 1, 3)
        return self.told(unpack(words, self.codec.widths, self.codec.components)).cast(np.float32)

    def decode(self, block: dict[str, Value]) -> Value:
        """Returns y^, float32 `[batch, kv_heads, tokens, components]`."""
        return self.numbers(block) * self.codec.step(CPU).numpy() + self.codec.least(CPU).numpy()

    def scores(self, query: Value, block: dict[str, Value]) -> Value:
        """Returns q.y^ `[batch, kv_heads, rows, tokens]`."""
        return query @ self.decode(block).permute(0, 1, 3, 2)

    def mix(self, weights: Value, block: dict[str, Value]) -> Value:
        """Returns sum_t p_t y^_t `[batch, kv_heads, rows, components]`."""
        return weights @ self.decode(block)

    @abstractmethod
    def stored(self, y: Value) -> Value:
        """Returns the codes of y, int32 of the same shape."""

    @abstractmethod
    def told(self, codes: Value) -> Value:
        """Returns the levels' numbers, int32, of codes `[batch, kv_heads, tokens, components]`."""


class Words(WordCodesWriter):
    """Writer of `MixedQuant`, with uniform levels."""

    def stored(self, y: Value) -> Value:
        """Returns the nearest levels' numbers."""
        most = self.codec.levels(CPU).numpy()
        codes = (y / self.codec.step(CPU).numpy() + most / 2).op("Round").at_least(0.0)
        return codes.op("Min", y.graph.constant(most)).cast(np.int32)

    def told(self, codes: Value) -> Value:
        """Returns the codes, which are the levels' numbers."""
        return codes
