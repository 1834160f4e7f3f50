"""Engines that are not installed are stood in for before a test imports what plugs into them; an artifact for all of them."""

import pytest
from placed_chunks import fitted
from sglang_stand_in import stand_in

stand_in()


@pytest.fixture(scope="module")
def artifact():
    return fitted()


@pytest.fixture(scope="module")
def path(artifact, tmp_path_factory):
    """The artifact as a file."""
    found = tmp_path_factory.mktemp("artifact") / "a.calib.safetensors"
    artifact.save(found)
    return str(found)
