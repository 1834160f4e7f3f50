"""What tests of several rooms start from."""

import gc
import os

import pytest

# Kernels are defined for the interpreter or for the compiler when their module is imported; no machine of the tests has a
# GPU, and what is compiled is compiled by a process of its own (test_ahead_of_time.py).
os.environ.setdefault("TRITON_INTERPRET", "1")
# A run is logged; only test_loggers.py looks at W&B, whose own process takes seconds to start.
os.environ["WANDB_MODE"] = "disabled"


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="every test with a few of its parameters, laws with few examples"
    )
    parser.addoption(
        "--sample",
        action="store_true",
        help="every test; of the table of methods and of products of parameters a sample",
    )


def pytest_configure(config):
    """Before a test's file is imported: laws read how many examples they take when they are."""
    if config.getoption("quick"):
        from law_examples import take_few

        take_few()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """See `selection.py`."""
    if not (config.getoption("quick") or config.getoption("sample")):
        return
    from selection import quick, sample  # they import torch

    taken = (quick if config.getoption("quick") else sample)(items)
    left = set(items) - set(taken)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = taken


def pytest_collection_finish():
    """What was imported stays: a test that collects garbage need not walk through half a million objects of other packages."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    """What tests recorded as "kernels": the figures of compiled kernels, printed by every run that compiles them."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    lines = [value for report in reports for name, value in report.user_properties if name == "kernels"]
    if lines:
        terminalreporter.section("kernels, compiled")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a toy model `llama` and a `text.txt` to fit it on."""
    from toy_language_model import save_text, save_toy  # not for tests that need no model

    folder = tmp_path_factory.mktemp("toy")
    save_toy(folder / "llama")
    save_text(folder / "text.txt")
    return folder


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """A test leaves no variables to the next one: Lightning sets LOCAL_RANK in the process that starts others, and where it is set
    starts none."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
