"""A model's rotary position embedding, as far as moving a query by some positions needs it."""

import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from calib.runtime.pages import upload


@dataclass(frozen=True, eq=False)
class Rotation:
    """Half-split RoPE: channels (i, i + r/2) of the first r turn by `frequencies[i]` a position.

    `frequencies` is float64 `[r/2]`.
    """

    frequencies: Tensor

    @staticmethod
    def of(model: nn.Module) -> "Rotation":
        """The model's own, checked against what the model computes.

        Raises ValueError where frequencies depend on the length or the layer, or channels are not split in halves.
        """
        name = type(model).__name__
        embeddings: list[Any] = [
            part for part in model.modules() if isinstance(getattr(part, "inv_freq", None), Tensor)
        ]
        if len(embeddings) != 1:
            raise ValueError(
                f"{name} has {len(embeddings)} rotary embeddings, expected one for all layers; use positions='original'"
            )
        (embedding,) = embeddings
        if getattr(embedding, "rope_type", "default") in ("dynamic", "longrope"):
            raise ValueError(
                f"{name} has RoPE of type {embedding.rope_type!r}, whose frequencies change with the length; "
                "use positions='original'"
            )
        rotation = Rotation(embedding.inv_freq.detach().double().cpu())
        if not rotation._agrees(embedding):
            raise ValueError(f"{name} does not rotate its channels in halves; use positions='original'")
        return rotation

    def turns(self, positions: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 `[len(positions), 1, 1, r/2]`, for `turned`."""
        # In numbers of the host, and in float64: a float32 angle is off by then, and no step may wait for a copy.
        angles = [[position * frequency for frequency in self._numbers] for position in positions]
        parts = ([[of(angle) for angle in row] for row in angles] for of in (math.cos, math.sin))
        cos, sin = (upload(part, torch.float32, device)[:, None, None] for part in parts)
        return cos, sin

    @cached_property
    def _numbers(self) -> list[float]:
        numbers: list[float] = self.frequencies.tolist()
        return numbers

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [rows, heads, n, D]` moved forward by the positions of `cos` and `sin`."""
        half = cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _agrees(self, embedding: Any) -> bool:
        """Whether the model's function turns a vector as ours does."""
        apply = getattr(sys.modules[type(embedding).__module__], "apply_rotary_pos_emb", None)
        if apply is None:
            return False
        place = 7
        with torch.no_grad():
            x = torch.randn(1, 1, 1, 2 * len(self.frequencies), generator=torch.Generator().manual_seed(0))
            x = x.to(embedding.inv_freq.device)
            cos, sin = embedding(x, torch.tensor([[place]], device=x.device))
            theirs = apply(x, x, cos, sin)[0]
            ours = self.turned(x, *self.turns([place], x.device)) * getattr(embedding, "attention_scaling", 1.0)
        return bool(torch.allclose(theirs, ours, atol=1e-4))
