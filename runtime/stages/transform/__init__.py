"""Invertible maps of a stream that attention undoes on the query or on its output."""

from calib.runtime.stages.transform.balancer import Balancer
from calib.runtime.stages.transform.basis import Basis, coded_width
from calib.runtime.stages.transform.channel import ChannelRange, ChannelScale
from calib.runtime.stages.transform.identity import Identity
from calib.runtime.stages.transform.inverse import inverse
from calib.runtime.stages.transform.measured import Measured, MeasuredBalancer, MeasuredRange, MeasuredScale
from calib.runtime.stages.transform.orthogonal import Orthogonal
from calib.runtime.stages.transform.without_bias import WithoutBias

__all__ = [
    "Balancer",
    "Basis",
    "ChannelRange",
    "ChannelScale",
    "Identity",
    "Measured",
    "MeasuredBalancer",
    "MeasuredRange",
    "MeasuredScale",
    "Orthogonal",
    "WithoutBias",
    "coded_width",
    "inverse",
]
