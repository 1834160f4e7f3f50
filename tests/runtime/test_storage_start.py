"""The first position of a chunk, found among candidates by its keys if these are clear, else refused."""

import pytest
import torch
from cases import calibrated_artifact
from oracle import rotated
from toy_models import random_model

from calib.runtime import Codec
from calib.runtime.rotation import Rotation

pytestmark = pytest.mark.arithmetic

CANDIDATES = list(range(0, 4096, 64))


@pytest.fixture(scope="module")
def artifact():
    """Its components' deviations fall by e^-3 over a head, so that keys before RoPE have a shape."""
    return calibrated_artifact(random_model("llama"))


def keys_before_rope(artifact, tokens, seed=0):
    """float64 `[layers, kv_heads, tokens, D]`: Gaussian, with the artifact's means and covariances."""
    mean, basis, errors = (artifact.tensor(f"keys.klt.before.{kind}").double() for kind in ("mean", "basis", "errors"))
    y = torch.randn(*mean.shape[:2], tokens, mean.shape[2], generator=torch.Generator().manual_seed(seed)).double()
    # Components in other units than the basis' own: what it calls a deviation of 1 is one along its rows.
    spread = torch.linspace(0, -6, mean.shape[2]).exp()
    return (y * errors[..., 0].sqrt()[:, :, None] * spread) @ torch.linalg.inv(basis).mT + mean[:, :, None]


def shaped(artifact):
    """The same artifact, fitted on such keys: variances that fall by e^-12 over a head."""
    tensors = dict(artifact.tensors)
    spread = torch.linspace(0, -12, tensors["keys.klt.before.mean"].shape[2]).exp()[:, None]
    for stem in ("keys.klt.before", "keys.klt.sized"):
        tensors[f"{stem}.errors"] = tensors[f"{stem}.errors"] * spread
    return type(artifact)(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def chunk_at(codec, keys, start):
    positions = torch.arange(start, start + keys.shape[2])[:, None].double()
    at = rotated(keys, codec.rotation.frequencies, positions).transpose(1, 2).flatten(2)
    return torch.stack([at, torch.zeros_like(at)]).bfloat16()


@pytest.mark.parametrize("tokens", [1, 5, 200])
@pytest.mark.parametrize("start", [0, 640, 4032])
def test_the_right_start_is_found(artifact, tokens, start):
    codec = Codec.from_artifact(shaped(artifact), bits=3)
    chunk = chunk_at(codec, keys_before_rope(artifact, tokens), start)
    assert codec.start_of(chunk, CANDIDATES) == start
    assert codec.start_of(chunk, [*CANDIDATES[::-1], start]) == start
    one = Codec.from_artifact(shaped(artifact), bits=3, heads=range(1))
    assert one.start_of(chunk[..., : one.head_dim], CANDIDATES) == start


def test_scores_are_the_formula(artifact):
    """In float64: the mean over tokens, heads and layers of log2 of a token's size in deviations."""
    fitted = shaped(artifact)
    codec, start, tokens = Codec.from_artifact(fitted, bits=3), 100, 30
    chunk = chunk_at(codec, keys_before_rope(artifact, tokens), start)
    mean, basis, errors = (fitted.tensor(f"keys.klt.before.{kind}").double() for kind in ("mean", "basis", "errors"))
    for candidate, found in zip((100, 228), codec._finder.scores(chunk[0], [100, 228]), strict=True):
        positions = torch.arange(candidate, candidate + tokens)[:, None].double()
        before = rotated(chunk[0].unflatten(-1, (2, -1)).transpose(1, 2), codec.rotation.frequencies, -positions)
        y = (before - mean[:, :, None]) @ basis.mT
        wanted = (y.square() / errors[..., 0][:, :, None]).mean(-1).sqrt().log2().mean()
        assert found == pytest.approx(float(wanted), abs=1e-3)


def test_what_is_not_clear_is_refused(artifact):
    codec = Codec.from_artifact(shaped(artifact), bits=3)
    chunk = chunk_at(codec, keys_before_rope(artifact, 40), 640)
    elsewhere = [position for position in CANDIDATES if position != 640]
    with pytest.raises(
        ValueError, match=r"no candidate fits these keys: the best, \d+, has a score of .* give the position"
    ):
        codec.start_of(chunk, elsewhere)
    still = Rotation(torch.full((16,), 1e-6, dtype=torch.float64))  # so slow that positions are rotated alike
    codec = Codec.from_artifact(shaped(artifact), bits=3, rotation=still)
    chunk = chunk_at(codec, keys_before_rope(artifact, 40), 640)
    with pytest.raises(ValueError, match=r"candidates \d+ and \d+ fit these keys nearly alike, .* give the position"):
        codec.start_of(chunk, [576, 640])
    assert codec.start_of(chunk, [640]) == 640
    for wrong, message in (
        ([], "candidates are empty"),
        ([-1], "a candidate must be a position"),
        ([2**30], "a candidate"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.start_of(chunk, wrong)


def test_a_wrong_start_costs_bits_and_turns_nothing(artifact):
    """Keys are decoded as they were, whatever start the header has: only the error of their codes is larger."""
    codec = Codec.from_artifact(shaped(artifact), bits=4, size=True)
    chunk = chunk_at(codec, keys_before_rope(artifact, 60), 640)
    errors = [
        float((codec.decode(codec.encode(chunk, start))[0] - chunk[0]).float().norm() / chunk[0].float().norm())
        for start in (640, 641, 100)
    ]
    assert errors[0] < 0.7 * errors[1] and errors[0] < 0.5 * errors[2] and errors[2] < 1.5
