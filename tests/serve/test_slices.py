"""KV heads of a tensor-parallel rank, and the largest size of a slice's blobs."""

import pytest
import torch
from cases import calibrated_artifact
from one_line import message
from toy_models import random_model

from calib.runtime import Codec
from calib.serve.fitted_model import FittedModel
from calib.serve.slices import Slices


def slices(kv_heads, made=None):
    return Slices((made if made is not None else []).append, kv_heads)


@pytest.mark.parametrize(
    ("kv_heads", "count", "world", "wanted"),
    [
        (8, 8, 1, [range(8)]),
        (8, 2, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, 1, 4, [range(1), range(1), range(1, 2), range(1, 2)]),  # two ranks share a head
    ],
)
def test_heads_of_ranks(kv_heads, count, world, wanted):
    assert [slices(kv_heads).of_rank(count, world, rank) for rank in range(world)] == wanted


@pytest.mark.parametrize(
    ("kv_heads", "count", "world", "rank"),
    [(8, 4, 4, 0), (8, 8, 2, 0), (8, 2, 3, 0), (8, 2, 4, 4), (8, 3, 1, 0), (8, 1, 1, 0), (8, 2, 0, 0)],
)
def test_other_ways_to_share_a_model_are_refused(kv_heads, count, world, rank):
    with pytest.raises(ValueError, match=f"rank {rank} of {world}") as error:
        slices(kv_heads).of_rank(count, world, rank)
    message(error)


@pytest.mark.arithmetic
def test_the_size_is_that_of_the_largest_slice():
    artifact = calibrated_artifact(random_model("llama"))
    own = Slices(lambda heads: Codec.from_artifact(artifact, bits=3, size=True, heads=heads, fixed_size=True), 2)
    sizes = [own.codec(range(first, first + 1)).size(64, dtype=torch.float16) for first in (0, 1)]
    assert sizes[0] != sizes[1]  # heads have unlike bits
    assert own.size(1, 64, torch.float16) == max(sizes)
    assert own.size(2, 64, torch.float16) == own.codec(range(2)).size(64, dtype=torch.float16)
    assert own.codec(range(2)) is own.codec(range(2))
    with pytest.raises(ValueError, match="3 KV heads") as error:
        own.size(3, 64, torch.float16)
    message(error)


@pytest.mark.arithmetic
def test_forms_are_those_of_every_slice(tmp_path):
    calibrated_artifact(random_model("llama")).save(tmp_path / "a.safetensors")
    model = FittedModel(str(tmp_path / "a.safetensors"), 2.0, trellis=True)
    assert all(model.slices.codec(heads).trellis for heads in (range(2), range(1, 2)))
    assert model.identity != FittedModel(str(tmp_path / "a.safetensors"), 2.0).identity
