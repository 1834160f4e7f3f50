"""Tierings, which decide the tier of a token: shares of a chunk, a budget of heavy and recent tokens, a budget for the
prompt alone, sinks and a window, or initial and local tokens."""

from calib.runtime.stages.tiering.heavy_recent import HeavyHitterBudget
from calib.runtime.stages.tiering.local import InitialAndWindow
from calib.runtime.stages.tiering.prompt_budget import PromptBudget
from calib.runtime.stages.tiering.shares import RatioTiers
from calib.runtime.stages.tiering.sinks import Sinks

__all__ = ["HeavyHitterBudget", "InitialAndWindow", "PromptBudget", "RatioTiers", "Sinks"]
