"""The model sizes from which the shapes of all statistics follow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Numbers of layers, query heads (`heads`) and KV heads, and channels of a head (`head_dim`)."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
