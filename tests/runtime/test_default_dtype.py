"""`torch.set_default_dtype` changes nothing: outputs, stored tensors and stored chunks have the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain

import pytest
import torch
from cases import CASES, calibrated_artifact
from in_turn import in_turn
from layer_walk import Tokens, feed
from stored_chunks import chunk_of
from torch import Tensor
from toy_models import random_model

from calib.runtime import Codec, compress
from calib.runtime.files.state import flat

pytestmark = pytest.mark.arithmetic

# The default dtype, and the dtype of the model that is compressed under it.
MODELS = {torch.float64: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32}


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def inputs(dtype: torch.dtype):
    """A model, an artifact and the tokens of three rows in 20 forwards: made under the usual default."""
    model = random_model("llama", dtype)
    sizes = [[130, 61, 99], *[[1, 1, 1]] * 14, [30, 23, 30], *[[1, 1, 1]] * 3, [3, 3, 3]]
    drawn = [
        [Tokens.random(model, size, seed=3 * n + row) for row, size in enumerate(own)] for n, own in enumerate(sizes)
    ]
    return model, calibrated_artifact(model), drawn


def walked(case, dtype: torch.dtype, path) -> dict[str, object]:
    """Runs a prompt, steps, a later turn, a crop, a reorder, a save and a step of the loaded cache; everything found, by name."""
    model, artifact, drawn = inputs(dtype)
    asked = {"method": case.method, "artifact": artifact if case.artifact else None, "seed": 0, **case.options}
    found: dict[str, object] = {}

    def keep(name: str, cache, outputs: list[list[Tensor]]) -> None:
        bits, numbers = flat(cache.state())
        found.update({f"{name} {part}": tensor.clone() for part, tensor in bits.items()})
        found.update({f"{name} output {i}": part for i, part in enumerate(chain.from_iterable(outputs))})
        found.update({f"{name} numbers": numbers, f"{name} memory": cache.memory()})

    with compress(model, **asked) as cache:
        outputs = [feed(cache, rows) for rows in drawn[:-1]]
        keep("stored", cache, list(chain.from_iterable(outputs)))
        cache.activate_past_recording()
        outputs = feed(cache, drawn[-1])
        cache.crop(-2)
        cache.batch_select_indices(torch.tensor([2, 0, 0]))
        cache.save(path)
        keep("reordered", cache, outputs)
    with compress(model, prefix=path, **asked) as cache:
        keep("loaded", cache, feed(cache, drawn[1]))
    return found


def differing(found: dict[str, object], others: dict[str, object]) -> list[str]:
    """Names of what differs between two results, tensors by dtype and bits."""
    assert found.keys() == others.keys()
    return [name for name, one in found.items() if not _same(one, others[name])]


def _same(one, other) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, list(MODELS)))
def test_a_cache_holds_and_attends_the_same_bits(case, dtype, tmp_path):
    usual = walked(case, MODELS[dtype], tmp_path / "usual.safetensors")
    with default(dtype):
        found = walked(case, MODELS[dtype], tmp_path / "other.safetensors")
    assert not differing(usual, found)
    assert (tmp_path / "usual.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", MODELS, ids=str)
@pytest.mark.parametrize("trellis", [False, True])
def test_a_chunk_has_the_same_blob_and_comes_back_alike(dtype, trellis):
    model, artifact, _ = inputs(torch.float32)
    chunk = chunk_of(model, 61)

    def stored() -> list[Tensor]:
        codec = Codec.from_artifact(artifact, bits=2.5, size=True, predict=True, trellis=trellis)
        blob = codec.encode(chunk, 5)
        return [blob, codec.decode(blob)]

    usual = stored()
    with default(dtype):
        assert all(map(_same, usual, stored()))
