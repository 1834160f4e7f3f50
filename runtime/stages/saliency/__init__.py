"""How important a token is, from the attention it gets."""

from calib.runtime.stages.saliency.fastgen import FastGen
from calib.runtime.stages.saliency.last_query import LastQuery
from calib.runtime.stages.saliency.mass import Accumulated, Normalised
from calib.runtime.stages.saliency.observation_window import ObservationWindow
from calib.runtime.stages.saliency.probes import STRATEGIES, Probes

__all__ = ["STRATEGIES", "Accumulated", "FastGen", "LastQuery", "Normalised", "ObservationWindow", "Probes"]
