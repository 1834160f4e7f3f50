"""Stops a process of tests in which the GPU has failed: after an illegal memory access all its later calls fail, and so would all
later tests."""

import os
import sys

import pytest
import torch

STOPPED = "the device has failed in this test"


def is_lost() -> bool:
    """Whether the device no longer works for this process."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """After a test that has lost the device, stop; a process of pytest-xdist ends, and xdist continues in a new one."""
    report = yield
    if report.failed and is_lost():
        if hasattr(item.config, "workerinput"):
            item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
            print(f"\n{item.nodeid}: {STOPPED}: {call.excinfo.exconly()}", file=sys.stderr, flush=True)
            os._exit(1)
        item.session.shouldstop = STOPPED
    return report
