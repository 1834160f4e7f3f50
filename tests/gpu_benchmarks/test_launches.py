"""Number of kernels that a decode step launches per layer: an upper bound for each method, and what counts as a launch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.launch_counts import METHODS, Launches, launches_of
from calib.runtime.tiered.chunks import ChunkStore

pytestmark = pytest.mark.arithmetic

# Most launches of a layer, torch's and ours together.
MOST = {"rtn": 4, "kivi": 3, "klt": 4, "zipcache": 4, "csr": 5, "gear": 5, "h2o": 5, "tova": 7, "mikv": 9}
MOST |= {"specache": 9}  # with a speculative token


@pytest.mark.full
@pytest.mark.parametrize("method", list(MOST))
def test_a_step_launches_no_more_than_it_did(method, monkeypatch):
    """Attention over the tiers, attention over exact tokens, and storing are one kernel each. Only `klt`, whose mixtures of
    components have to become channels first, merges the runs of attention in a launch of its own. The prompt's trellis search runs
    in torch, because the interpreter is slow."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    monkeypatch.setattr("calib.kernels.trellis.operation.prefers_triton", lambda device: False)
    found = launches_of(method, METHODS[method])
    assert (found.ours["attend"] or found.ours["_attend"]) and (found.ours["put"] or found.ours["move"])
    assert found.ours["exact"] == 1 and bool(found.ours["merge"]) == (method == "klt")
    assert found.total <= MOST[method], (found.torch, found.ours)


@pytest.mark.full
def test_a_step_of_zipcache_whose_queries_are_probes(monkeypatch):
    """Two tiers, the exact tokens, one launch that sums the attention mass and adds it to the stored one, and storing: no operator
    of torch."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")

    def every(store, step, rows):
        return [bytes([1] * len(store.sequences.probe_rows)) for _ in rows]

    monkeypatch.setattr(ChunkStore, "_probes_of_step", every)
    found = launches_of("zipcache", METHODS["zipcache"])
    assert found.ours == {"attend": 2, "exact": 1, "sum_rows": 1, "put": 1} and not found.torch, found


@pytest.mark.full
def test_a_step_that_attends_twice(monkeypatch):
    """SpeCache without a speculative token attends the low-bit copy for its probabilities, and then again with the fetched
    tokens."""
    monkeypatch.setenv("CALIB_KERNELS", "triton")
    found = launches_of("specache", {"speculative": False})
    assert found.ours["attend"] == found.ours["exact"] == found.ours["put"] == 2 and found.ours["sum_rows"] == 1
    assert found.total <= 11, (found.torch, found.ours)


def test_views_and_allocations_are_no_launches():
    with Launches() as found:
        numbers = torch.empty(4, 6)
        numbers.fill_(1).view(2, 12).mT[:1].unflatten(1, (2, 1)).expand(3, 1, 2, 1)
        (numbers[:, 2:] @ numbers.mT[2:]).softmax(-1)
        numbers.to(torch.bfloat16).split(2, 1)
    assert found.torch == {"fill_": 1, "mm": 1, "_softmax": 1, "_to_copy": 1} and not found.ours


@pytest.mark.full
def test_the_command_prints_a_table_and_refuses_other_names():
    root, command = Path(__file__).parents[2], [sys.executable, "-m", "benchmarks.gpu.launches"]
    done = subprocess.run([*command, "snapkv"], cwd=root, capture_output=True, text=True)
    head, row = done.stdout.splitlines()
    assert head.split() == ["method", "torch", "ours", "together", "once", "a", "step"]
    name, of_torch, ours, together, once = row.split()
    assert name == "snapkv" and int(of_torch) + int(ours) == int(together) and int(once) >= 0
    done = subprocess.run([*command, "kv"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        "no launches are counted of kv; name some of full, rtn, kivi"
    )
