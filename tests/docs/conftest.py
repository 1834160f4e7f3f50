"""The folder in which the documents' commands and snippets run, made once per process."""

import datasets
import pytest
from documents_sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory):
    """A sandbox in a temporary folder, which also holds the cache of data sets."""
    root = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        yield Sandbox(root)
