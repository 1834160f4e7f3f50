"""Chunks from whose keys the start position can be found, and an artifact for such keys."""

import torch
from cases import calibrated_artifact
from oracle import rotated
from toy_models import random_model

from calib.runtime import Artifact, Codec

SPREAD = -12  # the smallest variance of a head's components of keys before RoPE is e^SPREAD of the largest


def fitted() -> Artifact:
    """`calibrated_artifact` of a toy Llama, with variances of keys that fall from component to component, as a model's do."""
    artifact = calibrated_artifact(random_model("llama"))
    tensors = dict(artifact.tensors)
    spread = torch.linspace(0, SPREAD, tensors["keys.klt.before.mean"].shape[2]).exp()[:, None]
    for stem in ("keys.klt.before", "keys.klt.sized"):
        tensors[f"{stem}.errors"] = tensors[f"{stem}.errors"] * spread
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def placed(
    artifact: Artifact, codec: Codec, tokens: int, start: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """A chunk `[2, layers, tokens, kv_heads * D]` from position `start` on: Gaussian keys with the artifact's means and covariances
    before RoPE, rotated to their positions; Gaussian values."""
    mean, basis, errors = (artifact.tensor(f"keys.klt.before.{kind}").double() for kind in ("mean", "basis", "errors"))
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(*mean.shape[:2], tokens, mean.shape[2], generator=draw).double() * errors[:, :, None, :, 0].sqrt()
    before = y @ torch.linalg.inv(basis).mT + mean[:, :, None]
    positions = torch.arange(start, start + tokens)[:, None].double()
    keys = rotated(before, codec.rotation.frequencies, positions).transpose(1, 2).flatten(2)
    return torch.stack([keys, torch.randn(keys.shape, generator=draw).double()]).to(dtype)
