"""Stand-ins for SGLang and vLLM if they are not installed, set up before tests import the plugins; and a common artifact."""

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
    """Path of the artifact, saved as a file."""
    found = tmp_path_factory.mktemp("artifact") / "a.calib.safetensors"
    artifact.save(found)
    return str(found)


@pytest.fixture(scope="module")
def text(artifact):
    """Keys and values of a text of four of vLLM's chunks and 20 tokens."""
    return placed(artifact, Codec.from_artifact(artifact, bits=BITS), 4 * CHUNK + 20, 0, torch.float16)


@pytest.fixture
def serving(monkeypatch, path, tmp_path, text):
    """A function that makes vLLM engines, which share the folder `store`."""
    made = []

    def make(ranks=1, **fields):
        made.append(Serving(monkeypatch, path, tmp_path / "store", {"one": text, "two": text}, ranks, **fields))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
