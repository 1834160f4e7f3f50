"""What errors of `klt` cost head by head: the KL divergence with one head's keys or values coded, beside the error predicted.

Derivatives tell what a small error costs. At few bits errors are not small: a head on which little depends gets few bits, and
losing what it says costs less than predicted; elsewhere an error costs more. So errors of every head's keys, and of its values,
are weighed by

    f = (r_head^w r_layer^(1 - w))^(3/4),    r = KL measured / error predicted,    w = n / (n + 2)

where r_layer is of all heads' keys, or values, of the layer, and n sequences measured the head. A sequence's KL counts in units of
that sequence's mean r: an answer that hangs on few tokens loses more nats than running text. The power below one allows for few
sequences, and for one budget. A basis whose errors count f times as much has rows and steps times the root of f: codes and what
they decode to are the same, and bits are shared out otherwise.
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

BITS = 1.25  # a value
SEQUENCES = 16
HEADS = 4  # of a layer, to a sequence: of more heads a sequence measures some
ANSWER = 32  # tokens of a sequence, an eighth of it at most, that are said behind the rest
POWER = 0.75
DOUBT = 2  # sequences: a head that so many measured counts half, its layer's mean half
MOST = 32.0  # times as much, or as little, as predicted in the mean
SCALED = {"basis": 0.5, "steps": 0.5, "errors": 1.0}  # by which power of f


@torch.no_grad()
def head_losses(model: PreTrainedModel, artifact: Artifact, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """KL in nats a token with the keys, or the values, of one head coded; and the errors predicted.

    Float64 `[sequences, 2, layers, kv_heads]` and `[2, layers, kv_heads]`.

    Keys and values are those that `klt` has stored of a sequence but for its last tokens, read back. KL is NaN where a sequence
    did not measure a head, and of a layer that slides beside others that do not.

    Args:
        model: the one that the artifact was fitted on.
        artifact: with bases, steps and errors.
        tokens: int64 `[n, length]`, of which sixteen are used, evenly apart.

    Raises ValueError where this model cannot be compressed.
    """
    chosen = torch.linspace(0, len(tokens) - 1, min(len(tokens), SEQUENCES)).round().long()
    tokens = tokens[chosen].to(entry_device(model))
    prefix = tokens.shape[1] - said_of(tokens.shape[1])
    # Factors are of errors in general, and uniform levels are encoded sooner.
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
    """How many tokens of a sequence are said behind the rest of it."""
    return max(1, min(ANSWER, length // 8))


def heads_of(sequence: int, layer: int, heads: int, sequences: int) -> range:
    """The KV heads that a sequence measures: all of few, every n-th of many, so that each is measured equally often."""
    apart = min(-(-heads // HEADS), sequences)
    return range((sequence + layer) % apart, heads, apart)


def with_part(exact: Cache, layer: int, role: str, head: int, part: Tensor) -> Cache:
    """A cache as `exact`, which stays as it is, with other keys or values `[tokens, D]` of one head."""
    layers = [copy(one) for one in exact.layers]
    held = getattr(layers[layer], role).clone()
    count = min(held.shape[-2], len(part))  # a window has let go of some
    held[0, head, held.shape[-2] - count :] = part[len(part) - count :]
    setattr(layers[layer], role, held)
    return Cache(layers=layers)


def factors(losses: Tensor, predicted: Tensor) -> Tensor:
    """f of every head's keys and values, float64 `[2, layers, kv_heads]`; 1 where nothing was measured or predicted."""
    measured = losses.isfinite()
    units = losses.where(measured, 0).sum((1, 2, 3)) / predicted.where(measured, 0).sum((1, 2, 3))
    units = units.where(units > 0, torch.inf)[:, None, None, None]
    told = measured & units.isfinite() & (predicted > 0)
    kl, foreseen = (part.where(told, 0) for part in (losses / units, predicted))
    of_head, of_layer = (
        (kl.sum(over, keepdim=True) / foreseen.sum(over, keepdim=True)).clamp(1 / MOST, MOST) for over in (0, (0, 3))
    )
    own = (trust := told.sum(0)) / (trust + DOUBT)
    found = (of_head[0] ** own * of_layer[0] ** (1 - own)) ** POWER
    return found.where(trust > 0, 1)


def reweighted(artifact: Artifact, found: Tensor) -> dict[str, Tensor]:
    """The artifact's tensors of `klt`, with errors that count `found [2, layers, kv_heads]` times as much; others are left out."""
    scaled = {}
    for name, tensor in artifact.tensors.items():
        role, *family, kind = name.split(".")
        if role in ROLES and family[:1] == ["klt"] and kind in SCALED:
            by = found[ROLES.index(role)].pow(SCALED[kind])
            scaled[name] = (tensor.double() * by[(..., *(None,) * (tensor.dim() - 2))]).to(tensor.dtype)
    return scaled
