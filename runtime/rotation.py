"""A model's rotary position embedding (RoPE), for rotating queries and keys to other positions."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.kernels.attend.operation import STRIDE
from calib.kernels.unrotate.reference import rotated
from calib.kernels.upload import upload
from calib.runtime.messages.printable import printable

# The advice of methods that encode keys before RoPE where a model's RoPE cannot be undone.
KEEP_ROTATED = "use a method that keeps keys after RoPE, such as 'kivi'"

# In models of these types only sliding-window layers have RoPE; modules of SmolLM3 say so themselves (`use_rope`).
ROTATED_WHERE_SLIDING = frozenset({"afmoe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini"})


@dataclass(frozen=True, eq=False)
class Rotation:
    """Half-split RoPE: the channel pairs (i, i + r/2) of the first r channels are rotated by `frequencies[i]` radians per
    position.

    `frequencies` is float64 `[r/2]`. `scaling` is the factor by which the model also multiplies rotated channels (YaRN); the
    methods here do not apply it.
    """

    frequencies: Tensor
    scaling: float = 1.0

    @staticmethod
    def of(model: nn.Module, remedy: str) -> "Rotation":
        """Returns the model's rotation, checked against the model's own function. Where kinds of layers have different
        frequencies (Gemma 3), it is that of the layers whose cache is compressed.

        Raises ValueError, with `remedy` at its end, where frequencies depend on the length, positions have several axes, some
        layers are not rotated, or channels are not split in halves.
        """
        name = type(model).__name__
        kinds = ("", _kind(model))
        found = [(part, kind) for part in _decoder(model).modules() for kind in kinds if _frequencies(part, kind)]
        if len(found) != 1:
            raise ValueError(f"{name} has {len(found)} rotary embeddings, expected one for all layers; {remedy}")
        ((embedding, kind),) = found
        if _several_axes(model, embedding):
            raise ValueError(
                f"{name} rotates by positions of several axes (M-RoPE), which images have and a cache does not know; {remedy}"
            )
        types: Any = getattr(embedding, "rope_type", "default")
        rope_type = types[kind] if isinstance(types, dict) else types
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"{name} has RoPE of type {rope_type!r}, whose frequencies change with the length; {remedy}"
            )
        scaling = float(getattr(embedding, _named(kind, "attention_scaling"), 1.0))
        if plain := _not_rotated(model):
            raise ValueError(f"{name} applies no RoPE in layers {printable(plain)}; {remedy}")
        rotation = Rotation(getattr(embedding, _named(kind, "inv_freq")).detach().double().cpu(), scaling)
        if not rotation._agrees(embedding, kind):
            raise ValueError(f"{name} does not rotate its channels in halves, as rotate_half does; {remedy}")
        return rotation

    def cos_sin(self, positions: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 `[len(positions), 1, 1, r/2]`, as arguments of `rotated`."""
        # Computed on the host in float64: a float32 angle would be inexact at large positions, and a decode step must not wait
        # for a copy.
        angles = [[position * frequency for frequency in self._numbers] for position in positions]
        parts = ([[of(angle) for angle in row] for row in angles] for of in (math.cos, math.sin))
        cos, sin = (upload(part, torch.float32, device)[:, None, None] for part in parts)
        return cos, sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions`, int64 of any shape, on their device: float32 `[*positions.shape, r/2]`."""
        angles = positions.double()[..., None] * self._on(positions.device)
        return angles.cos().float(), angles.sin().float()

    def along(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions from `start` to before `stop`: float32 `[stop - start, r/2]`."""
        coarse, fine = self._strided(start, stop, device)
        cos, sin = (part.flatten(0, 1)[: stop - start].float() for part in _added(coarse[:, None], fine[None], 2))
        return cos, sin

    def across(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same as `along` with positions last: float32 `[r/2, stop - start]`."""
        coarse, fine = (part.movedim(0, -1).contiguous() for part in self._strided(start, stop, device))
        added = _added(coarse[..., None], fine[:, :, None], 0)
        cos, sin = (part.flatten(1, 2)[:, : stop - start].float() for part in added)
        return cos, sin

    def strided(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of every `STRIDE`th position from `start` to before `stop`, float32 `[n, 2, r/2]`, and of the positions 0
        ... STRIDE - 1, `[STRIDE, 2, r/2]`; any position is the sum of one of each."""
        coarse, fine = self._strided(start, stop, device)
        return coarse.float(), fine.float()

    def _strided(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        coarse = torch.arange(start, stop, STRIDE, device=device).double()[:, None] * self._on(device)
        fine = torch.arange(STRIDE, device=device).double()[:, None] * self._on(device)
        coarse, fine = (torch.stack([part.cos(), part.sin()], 1) for part in (coarse, fine))
        return coarse, fine

    def _on(self, device: torch.device) -> Tensor:
        """The frequencies on `device`, uploaded without waiting for it."""
        if device not in self._copies:
            self._copies[device] = upload(self._numbers, torch.float64, device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {self.frequencies.device: self.frequencies}

    @cached_property
    def _numbers(self) -> list[float]:
        numbers: list[float] = self.frequencies.tolist()
        return numbers

    rotated = staticmethod(rotated)

    def _agrees(self, embedding: Any, kind: str) -> bool:
        """Whether the model's `apply_rotary_pos_emb` rotates a vector as `rotated` does."""
        apply = getattr(sys.modules[type(embedding).__module__], "apply_rotary_pos_emb", None)
        if apply is None:
            return False
        at = 7
        with torch.no_grad():
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(1, 1, 1, 2 * len(self.frequencies), generator=draw, dtype=torch.float32)
            x = x.to(getattr(embedding, _named(kind, "inv_freq")).device)
            cos, sin = embedding(x, torch.tensor([[at]], device=x.device), *([kind] if kind else []))
            # Gemma 4's function takes one tensor, others take queries and keys.
            applied = apply(*[x] * list(signature(apply).parameters).index("cos"), cos, sin)
            theirs = applied if isinstance(applied, Tensor) else applied[0]
            ours = self.rotated(x, *self.cos_sin([at], x.device)) * self.scaling
        return bool(torch.allclose(theirs, ours, atol=1e-4))


def _added(one: Tensor, other: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """cos and sin, stacked along `axis`, of the sums of two angles by the addition theorems, which are cheaper than a cosine."""
    (cos, sin), (other_cos, other_sin) = (part.unbind(axis) for part in (one, other))
    return cos * other_cos - sin * other_sin, sin * other_cos + cos * other_sin


def _decoder(model: nn.Module) -> nn.Module:
    """The model's text decoder: encoders of images or sound have rotary embeddings of their own."""
    return model.get_decoder() if isinstance(model, PreTrainedModel) else model


def _several_axes(model: nn.Module, embedding: nn.Module) -> bool:
    """Whether positions may differ by axis (M-RoPE), as they do beside images; in a text-only model all axes are equal."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    named = "mrope_section" in (getattr(text, "rope_parameters", None) or {})
    return text is not config and (named or getattr(embedding, "mrope_section", None) is not None)


def _kind(model: nn.Module) -> str:
    """The `layer_types` entry of the compressed layers: full attention where any layer has it, else the first layer's."""
    config: Any = model.config
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"]
    return "full_attention" if "full_attention" in kinds else str(kinds[0])


def _not_rotated(model: nn.Module) -> list[int]:
    """The attention layers without RoPE, in a model where others have it."""
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    slides = config.model_type in ROTATED_WHERE_SLIDING and getattr(config, "sliding_window", None) is not None
    kinds: list[str] = config.layer_types if slides else []
    plain = {layer for layer, kind in enumerate(kinds) if kind == "full_attention"}
    modules: Iterator[Any] = model.modules()
    return sorted(plain | {part.layer_idx for part in modules if getattr(part, "use_rope", None) in (0, False)})


def _named(kind: str, name: str) -> str:
    """The attribute `name` of a rotary embedding; one with frequencies for each kind of layer prefixes it with `kind`."""
    return f"{kind}_{name}" if kind else name


def _frequencies(part: nn.Module, kind: str) -> bool:
    """Whether `part` is a rotary embedding for layers of `kind`."""
    return isinstance(getattr(part, _named(kind, "inv_freq"), None), Tensor)
