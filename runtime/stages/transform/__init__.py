"""Invertible maps of a stream that attention undoes on its own side."""

from calib.runtime.stages.transform.channel import ChannelRange, ChannelScale
from calib.runtime.stages.transform.identity import Identity

__all__ = ["ChannelRange", "ChannelScale", "Identity"]
