"""Tokens into packed blocks and back."""

from calib.runtime.stages.codec.clipped import Clipped
from calib.runtime.stages.codec.codebook import Codebook
from calib.runtime.stages.codec.corrected import Corrected
from calib.runtime.stages.codec.direction import Direction
from calib.runtime.stages.codec.dual_scale import DualScale
from calib.runtime.stages.codec.exact import Exact
from calib.runtime.stages.codec.mixed import MixedQuant
from calib.runtime.stages.codec.scaled_channels import ScaledChannels
from calib.runtime.stages.codec.sized import Sized
from calib.runtime.stages.codec.sparse import Sparse
from calib.runtime.stages.codec.token_range import TokenRange
from calib.runtime.stages.codec.trellis import TrellisQuant
from calib.runtime.stages.codec.uniform import UniformQuant
from calib.runtime.stages.contract import Codec

__all__ = [
    "Clipped",
    "Codebook",
    "Codec",
    "Corrected",
    "Direction",
    "DualScale",
    "Exact",
    "MixedQuant",
    "ScaledChannels",
    "Sized",
    "Sparse",
    "TokenRange",
    "TrellisQuant",
    "UniformQuant",
]
