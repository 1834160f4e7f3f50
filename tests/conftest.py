"""Options, hooks and fixtures of all tests."""

import gc
import os

import pytest

# Triton defines a kernel for its interpreter or its compiler when the kernel's module is imported. Tests need no GPU; kernels are
# compiled only in processes of their own (test_ahead_of_time.py).
os.environ.setdefault("TRITON_INTERPRET", "1")
# Runs log to CSV instead of W&B, whose process takes seconds to start; tests of the W&B logger set this variable again.
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
    """Set the number of examples of property tests for `--quick` before their files are imported, because they read it then."""
    if config.getoption("quick"):
        from law_examples import take_few

        take_few()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect what `--quick` or `--sample` leaves out, by the rules of `selection.py`."""
    if not (config.getoption("quick") or config.getoption("sample")):
        return
    from selection import quick, sample  # they import torch

    taken = (quick if config.getoption("quick") else sample)(items)
    left = set(items) - set(taken)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = taken


def pytest_collection_finish():
    """Freeze what was imported, so that `gc.collect()` in a test does not traverse half a million objects of other packages."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    """Print the user property "kernels" of tests: the figures of kernels that they compiled."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    lines = [value for report in reports for name, value in report.user_properties if name == "kernels"]
    if lines:
        terminalreporter.section("kernels, compiled")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a toy model `llama` and a `text.txt` to fit it on."""
    from toy_language_model import save_text, save_toy  # imports torch, which tests without a model need not load

    folder = tmp_path_factory.mktemp("toy")
    save_toy(folder / "llama")
    save_text(folder / "text.txt")
    return folder


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """Restore the environment variables after each test: Lightning sets LOCAL_RANK in the process that starts others, and starts
    none if the variable is set."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
