"""Host cost of launching attention, counted in calls of Python functions. The kernel itself is not run."""

import sys
from functools import partial

import pytest
import torch
from launches import watch

from calib.kernels.attend import page_launch, triton
from calib.kernels.attend.operation import PageSpan
from calib.kernels.attend.options import CHANNEL, TOKEN, constants_of
from calib.kernels.attend.signatures import exact_stream, rope_tables_of, stream_of

pytestmark = pytest.mark.arithmetic

# Largest number of calls per launch. With the PTX text of the unpacking built at each launch there were 1,100 calls for 4 bits, and
# 2,900 for 2.
MOST = 300


def calls(work) -> int:
    """Python functions called by `work()`, its second time."""
    work()
    found = []
    sys.setprofile(lambda frame, event, argument: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(found)


@pytest.mark.parametrize("bits", [1, 2, 4, (6, 4, 3, 2, 1)], ids=str)
def test_a_launch_makes_nothing_that_the_compiler_makes(bits, monkeypatch):
    """The second launch takes few calls, so nothing that only compilation needs is built again. Constants are those of a compiled
    kernel, not of an interpreted one."""
    monkeypatch.setattr(page_launch, "constants_of", partial(constants_of, interpreted=False))
    launched = watch(monkeypatch, "attend", runs=False)
    keys, values = stream_of(bits, CHANNEL, 32, channels=80), stream_of(bits, TOKEN, channels=80)
    query = torch.zeros(1, 1, 4, 80, device="meta")
    span = PageSpan(*(torch.zeros(size, dtype=torch.int32, device="meta") for size in ((1, 8), (1,))))
    work = partial(triton.attend_pages, query, keys, values, span, None, None, False, False)
    assert calls(work) < MOST
    assert {launch.kernel for launch in launched} == {"attend", "merge"}


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)], ids=str)
def test_programs_fit_where_shared_memory_is_little(capability, monkeypatch):
    """Capabilities with 99 KiB of shared memory get smaller blocks and one stage, as compiled in
    `test_ahead_of_time.test_programs_fit_99_kib`."""
    little = capability not in ((8, 0), (9, 0))
    monkeypatch.setattr(page_launch, "capability_of", lambda device: capability)
    wide, components = exact_stream(256), stream_of((6, 4, 3, 2, 1), channels=80)
    exact = page_launch.made(wide, wide, 64, None, None, False)
    assert (exact.options["M"], exact.blocks) == ((16, 4) if little else (64, 1))
    turned = page_launch.made(components, components, 8, None, rope_tables_of(80, 128), False)
    assert turned.options["num_stages"] == (1 if little else 3)
