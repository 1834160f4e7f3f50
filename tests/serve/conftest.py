"""Engines that are not installed are stood in for before a test imports what plugs into them; an artifact for all of them."""

import pytest
import sglang_stand_in
import torch
import vllm_stand_in
from placed_chunks import fitted, placed

from calib.runtime import Codec

sglang_stand_in.stand_in()
vllm_stand_in.stand_in()

from vllm_serving import BITS, CHUNK, Serving  # noqa: E402  # behind the stand-ins, which it imports


@pytest.fixture(scope="module")
def artifact():
    return fitted()


@pytest.fixture(scope="module")
def path(artifact, tmp_path_factory):
    """The artifact as a file."""
    found = tmp_path_factory.mktemp("artifact") / "a.calib.safetensors"
    artifact.save(found)
    return str(found)


@pytest.fixture(scope="module")
def text(artifact):
    """Keys and values of four of vLLM's chunks and a rest."""
    return placed(artifact, Codec.from_artifact(artifact, bits=BITS), 4 * CHUNK + 20, 0, torch.float16)


@pytest.fixture
def serving(monkeypatch, path, tmp_path, text):
    """Makes engines of vLLM's that share a folder, `store`."""
    made = []

    def make(ranks=1, **fields):
        made.append(Serving(monkeypatch, path, tmp_path / "store", {"one": text, "two": text}, ranks, **fields))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
