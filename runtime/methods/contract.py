"""What a method is: a frozen dataclass of options that turns one layer's geometry into the stages of its two streams."""

from dataclasses import dataclass
from typing import Any, Protocol

from calib.runtime.artifact import Artifact
from calib.runtime.pages import PAGE_TOKENS
from calib.runtime.stream import StreamPlan


@dataclass(frozen=True)
class Geometry:
    """What of a model's shape a method needs: attention layers, KV heads, channels a head."""

    layers: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> "Geometry":
        """The shape of a decoder's configuration as transformers writes it."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Geometry(config.num_hidden_layers, heads, head_dim)


@dataclass(frozen=True)
class LayerPlan:
    """The stages of one layer's keys and values; refuses what the storage cannot hold."""

    keys: StreamPlan
    values: StreamPlan

    def __post_init__(self) -> None:
        reach = 4 * max(self.keys.schedule.window(), self.values.schedule.window()) + 2
        for role, stream in (("keys", self.keys), ("values", self.values)):
            group = stream.codec.token_group()
            if PAGE_TOKENS % group:
                raise ValueError(
                    f"{role}: a group of {group} tokens does not divide a page of {PAGE_TOKENS}; use 1, 2, 4 ... {PAGE_TOKENS}"
                )
            if any(stream.schedule.encoded(n) % group for n in range(reach)):
                raise ValueError(
                    f"{role}: blocks of {stream.schedule.window()} tokens are no whole number of groups of {group} tokens; "
                    f"use a residual that {group} divides"
                )
        if any(self.values.schedule.packed(n) > self.keys.schedule.packed(n) for n in range(reach)):
            raise ValueError(
                "values would be encoded before the keys of the same tokens; encode keys at least as early"
            )


class Method(Protocol):
    """One paper, one file. Fields are the options with their defaults; the docstring numbers the steps."""

    def plan(self, layer: int, geometry: Geometry, artifact: Artifact | None) -> LayerPlan:
        """The stages of attention layer `layer`; raises ValueError for options that do not fit this model or artifact."""
        ...
