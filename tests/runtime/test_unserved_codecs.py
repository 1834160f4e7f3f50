"""A codec that no kernel reads gives a warning of one line, once a process."""

import warnings
from dataclasses import dataclass

import pytest
from cases import BY_NAME
from toy_models import random_model

from calib.runtime import compress, methods
from calib.runtime.ordered.store import LayerPlan
from calib.runtime.ordered.stream import StreamPlan
from calib.runtime.stages.codec import UniformQuant, unserved
from calib.runtime.stages.schedule import SlidingResidual
from calib.runtime.stages.transform import Identity


@dataclass(frozen=True, eq=False)
class Homemade(UniformQuant):
    """A codec that only its own `scores` and `mix` read."""

    has_kernel = False

    def packed(self, pages, channels, shared):
        return None


@dataclass(frozen=True)
class Own:
    def plan(self, layer, geometry, artifact):
        stream = StreamPlan(Identity(), Homemade(4), SlidingResidual(0))
        return LayerPlan(stream, stream)


def test_it_says_so_once_and_others_say_nothing(monkeypatch):
    monkeypatch.setattr(unserved, "_told", set())
    monkeypatch.setitem(methods.METHODS, "own", Own)
    model = random_model("llama")
    with pytest.warns(UserWarning, match="^no kernel reads Homemade: ") as told:
        compress(model, "own").release()
    assert len(told) == 1 and "\n" not in str(told[0].message) and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("own", "kivi", "csr", "full"):
            compress(model, name).release()
        for name in ("klt-short", "klt-predicted"):
            BY_NAME[name].open(model).release()
