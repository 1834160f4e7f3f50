"""Placement: which tokens of the full cache in host memory are copied to the device, and when."""

from calib.runtime.stages.placement.top_blocks import TopBlocks
from calib.runtime.stages.placement.top_tokens import TopTokens

__all__ = ["TopBlocks", "TopTokens"]
