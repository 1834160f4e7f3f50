"""benchmarks/plan_cpu.py measures the caches that a plan has sizes of, and leaves out methods whose tensors no fit has measured."""

import pytest

from benchmarks import plan_cpu
from benchmarks.bases import made_up
from benchmarks.protocol import load
from calib.plan.cache_sizes import cache_sizes
from calib.plan.meta_model import read_meta_model
from calib.runtime import Artifact
from calib.runtime.methods import METHODS


@pytest.mark.full
def test_the_caches_of_the_methods_that_an_artifact_serves_are_as_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_cpu, "CONTEXT", 96)
    made_up(load(str(plan_cpu.EMBEDDED)), sized=True).save(plan_cpu.OUTPUT)
    model, artifact = read_meta_model(str(plan_cpu.EMBEDDED), "float32"), Artifact.load(plan_cpu.OUTPUT)
    plan = cache_sizes(model, artifact, plan_cpu.ROWS, plan_cpu.CONTEXT)
    found = plan_cpu.measured_caches(plan_cpu.EMBEDDED, plan_cpu.served({"cache": plan}))
    assert {"kvquant", "csr"} <= {*METHODS} - {*found} and {"klt", "gear", "h2o"} <= {*found}
    for name, one in found.items():
        assert one == pytest.approx({kind: plan["methods"][name][kind] for kind in one}, rel=0.01), name
