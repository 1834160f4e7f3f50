"""Keys and values that are rotated before quantisation (`basis`), against float64: what pages hold, errors, and refusals."""

import re

import numpy as np
import oracle
import pytest
import torch
from cases import calibrated_artifact
from layer_walk import Tokens, feed
from tolerances import FLOAT32_FOLD, ODD_CODES
from toy_artifact import toy_artifact
from toy_models import random_model

from calib.runtime import compress
from calib.runtime.artifact.artifact import ArtifactError
from calib.runtime.stages.hadamard import hadamard

LENGTH, RESIDUAL = 150, 16
METHODS = {
    "rtn": {"bits": 4},
    "kivi": {"bits": 3, "group": 16, "residual": RESIDUAL},
    "specache": {"bits": 2, "group": 16, "residual": RESIDUAL, "k": 4},
}


def rotations(basis: str, stream: str, layer: int, artifact) -> np.ndarray:
    """The rotation R of each KV head, float64 `[kv_heads, D, D]`, its entries rounded to multiples of 2^-22."""
    if basis == "calibrated":
        exact = artifact.tensor(f"{stream}.rotation")[layer].double().numpy()
    else:
        draw = torch.Generator().manual_seed({"keys": 0, "values": 1}[stream])
        exact = np.stack([(hadamard(32) * (torch.randint(2, (32,), generator=draw) * 2 - 1)).numpy()] * 2)
    return np.round(exact * 2**22) / 2**22


def rounded(y: np.ndarray, bits: int, group: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """y^ of `y [T, D]` whose groups of tokens x channels share a scale and a zero point in float16; and how far each value is from
    the border of its code, in steps."""
    tokens, channels = group
    own = y.reshape(len(y) // tokens, tokens, y.shape[1] // channels, channels)
    low, high = own.min((1, 3), keepdims=True), own.max((1, 3), keepdims=True)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    zero = low.astype(np.float16).astype(np.float64)
    level = (own - zero) / scale + 0.5
    found = np.clip(np.floor(level), 0, 2**bits - 1) * scale + zero
    return found.reshape(y.shape), abs(level - np.round(level)).reshape(y.shape)


def groups(method: str, stream: str) -> tuple[int, int]:
    if method == "rtn":
        return 1, 32
    return (16, 1) if stream == "keys" else (1, 16)


@pytest.mark.parametrize("basis", ["hadamard", "calibrated"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_stored_is_rounded_in_the_basis(method, basis):
    """x^ = R^T Q(R x), of a prompt and of single tokens after it; tokens of the exact window are not rotated."""
    model = random_model("llama")
    artifact, options = calibrated_artifact(model), METHODS[method]
    tokens = Tokens.random(model, LENGTH, seed=4)
    with compress(model, method, artifact=artifact, basis=basis, **options) as cache:
        for start, stop in ((0, 140), *((n, n + 1) for n in range(140, LENGTH))):
            feed(cache, [tokens[start:stop]])
        held = [oracle.held_tokens(layer, 0) for layer in cache.compressed]
    packed = {"keys": LENGTH, "values": LENGTH}
    if method != "rtn":
        packed = {"keys": LENGTH // RESIDUAL * RESIDUAL, "values": LENGTH - RESIDUAL}
    for layer, found in enumerate(held):
        for stream, given in (("keys", tokens.keys), ("values", tokens.values)):
            x, own, count = given[layer].double().numpy(), getattr(found, stream).numpy(), packed[stream]
            np.testing.assert_array_equal(own[:, count:], x[:, count:])
            for head, turned in enumerate(rotations(basis, stream, layer, artifact)):
                y, border = rounded(x[head, :count] @ turned.T, options["bits"], groups(method, stream))
                off = abs(own[head, :count] - y @ turned).max(-1) > FLOAT32_FOLD * abs(x[head]).max()
                # A coordinate that float32 puts on the other side of a border, or whose scale float16 rounds otherwise.
                assert off.mean() <= ODD_CODES * 2 * 32 * groups(method, stream)[0]
                assert border[off].min(initial=0) < 1e-3


@pytest.mark.parametrize("method", ["rtn", "kivi"])
def test_one_large_channel_no_longer_costs_the_others(method):
    """A token's range is as wide as its largest channel; a rotation spreads that over all channels. KIVI's keys, whose ranges are
    per channel, gain nothing."""
    model, errors = random_model("llama"), {}
    tokens = Tokens.random(model, 128, seed=5)
    tokens.keys[..., 3] *= 20
    tokens.values[..., 3] *= 20
    for basis in ("none", "hadamard"):
        with compress(model, method, bits=4, basis=basis) as cache:
            feed(cache, [tokens])
            keys, values, _ = oracle.held_tokens(cache.compressed[0], 0)
        others = [n for n in range(32) if n != 3]
        errors[basis] = [
            float((found - given[0])[..., others].square().mean().sqrt())
            for found, given in ((keys, tokens.keys), (values, tokens.values))
        ]
    better = errors["hadamard"][0] < 0.6 * errors["none"][0]
    assert better == (method == "rtn")
    if method == "rtn":
        assert errors["hadamard"][1] < 0.6 * errors["none"][1]


def test_none_is_what_there_was():
    """The default, `basis="none"`, uses the artifact's clip factors; another basis uses none."""
    model = random_model("llama")
    artifact, clips = calibrated_artifact(model), {}
    for basis in ("none", "hadamard", "calibrated"):
        for method in ("rtn", "kivi"):
            with compress(model, method, artifact=artifact, basis=basis) as cache:
                plan = cache.compressed[0].plan
            clips[basis, method] = [plan.keys.codec.clip, plan.values.codec.clip]
    for (basis, _), found in clips.items():
        assert all((clip == 1.0) if basis != "none" else isinstance(clip, torch.Tensor) for clip in found)
    with compress(model, "specache", artifact=artifact, bits=1, basis="hadamard") as cache:
        assert cache.compressed[0].plan.low.keys.codec.clip == 0.5  # eq. 3, as without an artifact


@pytest.mark.parametrize("method", METHODS)
def test_what_is_refused(method):
    model = random_model("llama")
    with pytest.raises(ValueError, match="basis must be one of none, hadamard, calibrated, got 'pca'"):
        compress(model, method, basis="pca")
    with pytest.raises(ValueError, match=r"basis='calibrated' needs calibrated rotations.*--model\.rotations true"):
        compress(model, method, basis="calibrated")
    bare = toy_artifact(model, tensors={"keys.low": torch.zeros(2, 2, 32)})
    with pytest.raises(ArtifactError, match=re.escape("keys.rotation")):
        compress(model, method, artifact=bare, basis="calibrated", clip=1.0)


def test_statistics_of_channels_are_refused_beside_a_rotation():
    model = random_model("llama")
    artifact = calibrated_artifact(model)
    for method in ("rtn", "kivi"):
        with pytest.raises(ValueError, match="basis='hadamard' with statistics='calibrated': the artifact's ranges"):
            compress(model, method, artifact=artifact, basis="hadamard", statistics="calibrated")
        for more in ({"outliers": 0.02}, {"rank": 2}):
            with pytest.raises(ValueError, match="were measured on channels, and this method encodes components"):
                compress(
                    model, method, artifact=artifact, basis="hadamard", corrections={**more, "statistics": "calibrated"}
                )
    with pytest.raises(
        ValueError,
        match=r"basis='hadamard' is an option of the default low-bit copy, which `low` replaces; give it within `low`",
    ):
        compress(model, "specache", basis="hadamard", low={"method": "rtn"})
