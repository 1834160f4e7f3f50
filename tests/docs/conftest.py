"""The folder in which what the documents show is run, made once a process."""

import datasets
import pytest
from documents_sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory):
    """Copies of data sets stay below it, too."""
    root = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        yield Sandbox(root)
