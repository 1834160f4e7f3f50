"""What errors of `klt` cost layer by layer: the KL divergence with one layer's keys or values coded, beside the error predicted.

Derivatives tell what a small error costs. At few bits errors are not small: a layer on which little depends gets few bits, and
losing what it says costs less than predicted; elsewhere an error costs more. So errors of every layer's keys, and of its values,
are weighed by

    f = (r / mean r)^(3/4),    r = KL measured / error predicted.

The mean is over all that is predicted; the power below one allows for few sequences, and for one budget. A basis whose errors count
f times as much has rows and steps times the root of f: codes and what they decode to are the same, and bits are shared out
otherwise.
"""

from copy import copy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from calib.capture.device_map import entry_device
from calib.fit.loss_curve import divergence, exact_answers
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.artifact.components import allocator
from calib.runtime.compress import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.methods.klt import Klt

BITS = 1.25  # a value
SEQUENCES = 8
ANSWER = 64  # tokens of a sequence, an eighth of it at most, that are said behind the rest
POWER = 0.75
MOST = 32.0  # times as much, or as little, as predicted in the mean
SCALED = {"basis": 0.5, "steps": 0.5, "errors": 1.0}  # by which power of f


@torch.no_grad()
def layer_losses(model: PreTrainedModel, artifact: Artifact, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """KL in nats a token with the keys, or the values, of one layer coded; and the errors predicted: float64 `[2, layers]` each.

    Keys and values are those that `klt` has stored of a sequence but for its last tokens, read back. 0 of a layer that slides
    beside others that do not.

    Args:
        model: the one that the artifact was fitted on.
        artifact: with bases, steps and errors.
        tokens: int64 `[n, length]`, of which eight are used, evenly apart.

    Raises ValueError where this model cannot be compressed.
    """
    chosen = torch.linspace(0, len(tokens) - 1, min(len(tokens), SEQUENCES)).round().long()
    tokens = tokens[chosen].to(entry_device(model))
    prefix = tokens.shape[1] - said_of(tokens.shape[1])
    coding = Klt(bits=BITS).coding(artifact)
    budgets = allocator(artifact, coding)
    predicted = budgets.at_bits(bits := max(BITS, budgets.least_bits)).errors
    losses = torch.zeros(len(ROLES), budgets.layers, dtype=torch.float64)
    options = {"bits": bits, "rope": coding.rope, "size": coding.size, "predict": coding.predict, "window": 0}
    with compress(model, "klt", artifact=artifact, **options) as coded:
        for row in tokens:
            coded.reset()
            exact = DynamicCache(config=model.config.get_text_config(decoder=True))
            said = exact_answers(model, row, prefix, [coded, exact])
            for number, layer in enumerate(coded.layers):
                if isinstance(layer, CompressedLayer) and layer.store is not None:
                    for role, part in zip(ROLES, layer.store.read_back(0), strict=True):
                        one = with_part(exact, number, role, part)
                        losses[ROLES.index(role), number] += divergence(model, row[prefix:], one, said)
    return losses / len(tokens), torch.tensor([predicted[role] for role in ROLES], dtype=torch.float64)


def said_of(length: int) -> int:
    """How many tokens of a sequence are said behind the rest of it."""
    return max(1, min(ANSWER, length // 8))


def with_part(exact: Cache, layer: int, role: str, part: Tensor) -> Cache:
    """A cache as `exact`, which stays as it is, with other keys or values `[kv_heads, tokens, D]` of one layer."""
    layers = [copy(one) for one in exact.layers]
    held = getattr(layers[layer], role)
    count = min(held.shape[-2], part.shape[-2])  # a window has let go of some
    setattr(layers[layer], role, torch.cat([held[..., :-count, :], part[None, :, -count:].to(held)], -2))
    return Cache(layers=layers)


def factors(losses: Tensor, predicted: Tensor) -> Tensor:
    """f of every layer's keys and values, float64 `[2, layers]`; 1 where nothing was measured or predicted."""
    known = (losses > 0) & (predicted > 0)
    if not bool(known.any()):
        return torch.ones_like(losses)
    relative = losses / predicted * (predicted[known].sum() / losses[known].sum())
    return relative.clamp(1 / MOST, MOST).pow(POWER).where(known, 1)


def reweighted(artifact: Artifact, found: Tensor) -> dict[str, Tensor]:
    """The artifact's tensors of `klt`, with errors that count `found [2, layers]` times as much; others are left out."""
    scaled = {}
    for name, tensor in artifact.tensors.items():
        role, *family, kind = name.split(".")
        if role in ROLES and family[:1] == ["klt"] and kind in SCALED:
            by = found[ROLES.index(role)].pow(SCALED[kind])
            scaled[name] = (tensor.double() * by[(..., *(None,) * (tensor.dim() - 1))]).to(tensor.dtype)
    return scaled
