"""Tokens into packed blocks and back."""

from calib.runtime.stages.codec.exact import Exact
from calib.runtime.stages.codec.uniform import UniformQuant

__all__ = ["Exact", "UniformQuant"]
