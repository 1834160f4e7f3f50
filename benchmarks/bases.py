"""Random bases for `klt`, for timing: the time of a step does not depend on the bases."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.runtime import Artifact
from calib.runtime.artifact.fingerprint import fingerprint
from calib.runtime.methods import Geometry

# Best steps of a Gaussian component of variance 1 at 1 ... 8 bits, and its errors at 0 ... 8 bits.
STEPS = (1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000876)


def made_up(model: PreTrainedModel, sized: bool = False, storage: bool = False) -> Artifact:
    """Returns an artifact with random components of keys, before and after RoPE, and of values.

    Directions are random; standard deviations fall by e^-4 over a head and differ between heads. `sized`: also the tensors for
    sizes of tokens and predictions of values; `storage`: also those of the profile "storage" of stored chunks.
    """
    geometry, draw = Geometry.of(model.config), torch.Generator().manual_seed(0)
    shape, tensors = (geometry.layers, geometry.kv_heads, geometry.head_dim), dict[str, Tensor]()
    for stem in ("keys.klt", "values.klt", "keys.klt.before"):
        axes = torch.linalg.qr(torch.randn(*shape, shape[-1], generator=draw)).Q
        worth = torch.exp(-torch.linspace(0, 4, shape[-1]) + 0.3 * torch.randn(*shape[:2], 1, generator=draw))
        tensors[f"{stem}.mean"] = torch.zeros(shape)
        tensors[f"{stem}.basis"] = worth[..., None] * axes
        tensors[f"{stem}.steps"] = worth[..., None] * torch.tensor(STEPS)
        tensors[f"{stem}.errors"] = worth[..., None].square() * torch.tensor(ERRORS)
    if sized:
        for name, plain in (("keys.klt.sized", "keys.klt.before"), ("values.klt.sized", "values.klt")):
            tensors |= {f"{name}.{kind}": tensors[f"{plain}.{kind}"].clone() for kind in ("steps", "errors")}
        for kind in ("basis", "steps", "errors"):
            tensors[f"values.klt.predicted.{kind}"] = tensors[f"values.klt.{kind}"].clone()
        matrix = torch.randn(*shape, shape[-1], generator=draw) / shape[-1]
        tensors["values.klt.predicted.matrix"] = matrix
    layers, width = shape[0], shape[1] * shape[2]
    for name, known in (("keys.storage", 2), ("values.storage", 3)) if storage else ():
        axes = torch.linalg.qr(torch.randn(layers, 1, width, width, generator=draw)).Q
        worth = torch.exp(-torch.linspace(0, 4, width) + 0.3 * torch.randn(layers, 1, 1, generator=draw))
        tensors[f"{name}.mean"] = torch.zeros(layers, 1, width)
        tensors[f"{name}.basis"] = worth[..., None] * axes
        tensors[f"{name}.steps"] = worth[..., None] * torch.tensor(STEPS)
        tensors[f"{name}.errors"] = worth[..., None].square() * torch.tensor(ERRORS)
        tensors[f"{name}.matrix"] = 0.1 * torch.randn(layers, known * width, width, generator=draw) / width**0.5
        tensors[f"{name}.matrix"][0, : 2 * width] = 0
    return Artifact(tensors, fingerprint(model), {})
