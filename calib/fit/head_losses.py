"""Measured loss of each head's `klt` errors: the KL divergence with only that head's keys or values coded, over the predicted one.

`klt` predicts the loss of an error from derivatives, which hold for small errors. At few bits errors are not small: a head that
matters little gets few bits, and losing it costs less than predicted; other heads cost more. So the errors of each head's keys,
and of its values, are multiplied by

    f = (r_head^w r_layer^(1 - w))^(3/4),    r = KL measured / error predicted,    w = n / (n + 2)

where r_head is the ratio of one head's keys (or values), r_layer that of all heads of the layer together, and n the number of
sequences on which the head was measured. A sequence's KL is divided by that sequence's mean r, because an answer that depends on
few tokens loses more nats than running text. The power below one makes the correction cautious: there are few sequences, and one
budget. To make errors count f times as much, the rows of the basis and the steps are multiplied by sqrt(f): codes and decoded
vectors stay the same, only the bit allocation changes.
"""

from copy import copy
from itertools import product

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from calib.capture.device_map import entry_device
from calib.capture.layer_outputs import LayerOutputs
from calib.fit.loss_curve import divergence, exact_answers
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import ROLES
from calib.runtime.artifact.components import allocator
from calib.runtime.compress import compress
from calib.runtime.layer import CompressedLayer
from calib.runtime.methods.klt import Klt

BITS = 1.25  # bits per value at which losses are measured
SEQUENCES = 16
HEADS = 4  # heads of a layer measured on one sequence, more if sequences are few; other sequences measure the others
ANSWER = 32  # last tokens of a sequence, at most an eighth of it, at which predictions are compared
POWER = 0.75
DOUBT = 2  # n at which a head's own ratio and its layer's have equal weight
MOST = 32.0  # ratios are clamped to 1/32 ... 32
SCALED = {"basis": 0.5, "steps": 0.5, "errors": 1.0}  # power of f that multiplies each kind of tensor


@torch.no_grad()
def head_losses(model: PreTrainedModel, artifact: Artifact, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the KL divergence in nats per token with one head's keys (or values) coded, and the errors that `klt` predicts.

    Both float64: `[sequences, 2, layers, kv_heads]` and `[2, layers, kv_heads]`, the axis of 2 being keys, values.

    The coded keys and values are read back from a `klt` cache that holds all of a sequence but its last tokens; the KL is
    that of the predictions at those last tokens. It is NaN for heads not measured on a sequence, and for sliding-window
    layers of a model that also has layers without a window.

    Args:
        model: the model that the artifact was fitted on.
        artifact: with bases, steps and errors of `klt`.
        tokens: int64 `[n, length]`; 16 evenly spaced rows are used.

    Raises ValueError if the model cannot be compressed.
    """
    chosen = torch.linspace(0, len(tokens) - 1, min(len(tokens), SEQUENCES), dtype=torch.float32).round().long()
    tokens = tokens[chosen].to(entry_device(model))
    prefix = tokens.shape[1] - said_of(tokens.shape[1])
    # The factors hold for errors of any code, and uniform levels are encoded faster than a trellis.
    coding = Klt(bits=BITS, trellis=False).coding(artifact)
    budgets = allocator(artifact, coding)
    predicted = budgets.at_bits(bits := max(BITS, budgets.least_bits)).errors
    losses = torch.full((len(tokens), len(ROLES), budgets.layers, budgets.heads), torch.nan, dtype=torch.float64)
    forms = {"rope": coding.rope, "size": coding.size, "predict": coding.predict, "trellis": coding.trellis}
    options = {"bits": bits, **forms, "window": 0}
    outputs = LayerOutputs(model)
    with compress(model, "klt", artifact=artifact, **options) as coded:
        for sequence, row in enumerate(tokens):
            coded.reset()
            exact = DynamicCache(config=model.config.get_text_config(decoder=True))
            said = exact_answers(model, row, prefix, [coded, exact])
            with outputs.recorded():
                divergence(model, row[prefix:], Cache(layers=[copy(one) for one in exact.layers]), said)
            for number, layer in enumerate(coded.layers):
                if isinstance(layer, CompressedLayer) and layer.store is not None:
                    heads = heads_of(sequence, number, budgets.heads, len(tokens))
                    for (role, part), head in product(enumerate(layer.store.read_back(0)), heads):
                        one = with_part(exact, number, ROLES[role], head, part[head])
                        with outputs.begun_at(number):
                            losses[sequence, role, number, head] = divergence(model, row[prefix:], one, said)
    return losses, torch.tensor([predicted[role] for role in ROLES], dtype=torch.float64)


def said_of(length: int) -> int:
    """Returns at how many last tokens of a sequence predictions are compared."""
    return max(1, min(ANSWER, length // 8))


def heads_of(sequence: int, layer: int, heads: int, sequences: int) -> range:
    """Returns the KV heads of `layer` measured on a sequence: all if they are few, else every n-th, in turn over sequences."""
    apart = min(-(-heads // HEADS), sequences)
    return range((sequence + layer) % apart, heads, apart)


def with_part(exact: Cache, layer: int, role: str, head: int, part: Tensor) -> Cache:
    """Returns a copy of the cache `exact` with one head's keys or values replaced by `part [tokens, D]`.

    `role` is `keys` or `values`; `exact` itself is not changed.
    """
    layers = [copy(one) for one in exact.layers]
    held = getattr(layers[layer], role).clone()
    count = min(held.shape[-2], len(part))  # a sliding-window layer has dropped its earliest tokens
    held[0, head, held.shape[-2] - count :] = part[len(part) - count :]
    setattr(layers[layer], role, held)
    return Cache(layers=layers)


def factors(losses: Tensor, predicted: Tensor) -> Tensor:
    """Returns f of every head's keys and values, float64 `[2, layers, kv_heads]`; 1 where nothing was measured or predicted.

    Args:
        losses, predicted: as `head_losses` returns them.
    """
    measured = losses.isfinite()
    units = losses.where(measured, 0).sum((1, 2, 3)) / predicted.where(measured, 0).sum((1, 2, 3))
    units = units.where(units > 0, torch.inf)[:, None, None, None]
    told = measured & units.isfinite() & (predicted > 0)
    kl, foreseen = (part.where(told, 0) for part in (losses / units, predicted))
    of_head, of_layer = (
        (kl.sum(over, keepdim=True) / foreseen.sum(over, keepdim=True)).clamp(1 / MOST, MOST) for over in (0, (0, 3))
    )
    own = (trust := told.sum(0)).float() / (trust + DOUBT)
    found = (of_head[0] ** own * of_layer[0] ** (1 - own)) ** POWER
    return found.where(trust > 0, 1)


def reweighted(artifact: Artifact, found: Tensor) -> dict[str, Tensor]:
    """Returns the artifact's `klt` bases, steps and errors, rescaled by the factors f, `found [2, layers, kv_heads]`."""
    scaled = {}
    for name, tensor in artifact.tensors.items():
        role, *family, kind = name.split(".")
        if role in ROLES and family[:1] == ["klt"] and kind in SCALED:
            by = found[ROLES.index(role)].pow(SCALED[kind])
            scaled[name] = (tensor.double() * by[(..., *(None,) * (tensor.dim() - 2))]).to(tensor.dtype)
    return scaled
