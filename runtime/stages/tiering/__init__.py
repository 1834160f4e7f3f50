"""Which tier a token goes to: shares of a chunk, a budget of heavy and recent tokens, sinks and a window,
or first and local ones."""

from calib.runtime.stages.tiering.heavy_recent import HeavyRecent
from calib.runtime.stages.tiering.local import Local
from calib.runtime.stages.tiering.shares import Shares
from calib.runtime.stages.tiering.sinks import Sinks

__all__ = ["HeavyRecent", "Local", "Shares", "Sinks"]
