"""Chunks whose keys tell where they begin, and an artifact that was fitted on such keys."""

import torch
from cases import calibrated_artifact
from oracle import rotated
from toy_models import random_model

from calib.runtime import Artifact, Codec

SPREAD = -12  # e-folds over which the variances of keys before RoPE fall in a head


def fitted() -> Artifact:
    """`calibrated_artifact` of a toy Llama, for keys whose variances fall over a head, as a model's do."""
    artifact = calibrated_artifact(random_model("llama"))
    tensors = dict(artifact.tensors)
    spread = torch.linspace(0, SPREAD, tensors["keys.klt.before.mean"].shape[2]).exp()[:, None]
    for stem in ("keys.klt.before", "keys.klt.sized"):
        tensors[f"{stem}.errors"] = tensors[f"{stem}.errors"] * spread
    return Artifact(tensors, artifact.fingerprint, artifact.provenance, artifact.clip_bits)


def placed(
    artifact: Artifact, codec: Codec, tokens: int, start: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """`[2, layers, tokens, kv_heads * D]`: Gaussian keys before RoPE of the artifact's means and covariances, rotated."""
    mean, basis, errors = (artifact.tensor(f"keys.klt.before.{kind}").double() for kind in ("mean", "basis", "errors"))
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(*mean.shape[:2], tokens, mean.shape[2], generator=draw).double() * errors[:, :, None, :, 0].sqrt()
    before = y @ torch.linalg.inv(basis).mT + mean[:, :, None]
    positions = torch.arange(start, start + tokens)[:, None].double()
    keys = rotated(before, codec.rotation.frequencies, positions).transpose(1, 2).flatten(2)
    return torch.stack([keys, torch.randn(keys.shape, generator=draw).double()]).to(dtype)
