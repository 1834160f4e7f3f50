"""`compress(model, method=...)`: builds the cache of a method for a model and attaches our attention to the model."""

import os
import weakref
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from calib.runtime.artifact import Artifact
from calib.runtime.attachment import Attachment
from calib.runtime.cache import CompressedCache
from calib.runtime.guesses import Guesses
from calib.runtime.layer import CompressedLayer
from calib.runtime.methods import Geometry, build, options_asked
from calib.runtime.prefix import Origin, load
from calib.runtime.rotation import Rotation
from calib.runtime.step_graphs import graphs_for
from calib.runtime.store import Place
from calib.runtime.tuned import check_one_ledger

# What a configuration says when a decoder attends to another sequence as well.
CROSS_ATTENTION = ("add_cross_attention", "cross_attention_layers")


def compress(
    model: PreTrainedModel,
    method: str,
    artifact: Artifact | None = None,
    *,
    seed: int = 0,
    allow_finetuned: bool = False,
    graphs: bool = False,
    prefix: str | os.PathLike[str] | None = None,
    **options: Any,
) -> CompressedCache:
    """An empty cache of `method` for `model.generate(past_key_values=cache)`, or for any forward of the model.

    Usable as `with compress(...) as cache:` or freely, with `cache.release()` at the end; then the model is exactly as
    it was. Several caches may be attached to one model.

    Args:
        model: a decoder of transformers whose attention goes through its attention interface.
        method: a name from `calib methods`.
        artifact: what `calib fit` wrote for this model; None where the method needs no statistic.
        seed: for methods that draw (probes, starts); the same seed gives the same bits.
        allow_finetuned: accept an artifact of a relative with other weights, and a prefix of weights that cannot be compared.
        graphs: on a GPU, replay decode steps from CUDA graphs: what a step asks of the host is then one call.
        prefix: a file of `cache.save`: the cache begins with what that one held. Model, method, options, seed and artifact
            must be the same.
        options: the method's own (`bits=2`); or `tuned=2.5` alone, which takes those that `calib tune` chose for that budget,
            layer by layer, from the artifact.

    Raises:
        ValueError: unknown method or option, options that do not fit the model; `ArtifactError` for another model's artifact;
            `PrefixError` for a prefix that is not of this model, method and artifact.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a model of transformers, got {type(model).__name__}; pass the model itself")
    if artifact is not None and not isinstance(artifact, Artifact):
        raise ValueError(
            f"artifact must be an Artifact, got {artifact!r}; Artifact.load(path) or Artifact.from_pretrained(name) gives one"
        )
    if type(graphs) is not bool:
        raise ValueError(f"graphs must be True or False, got {graphs!r}")
    if type(seed) is not int:
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, so its cache cannot be compressed"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or any(getattr(config, name, None) for name in CROSS_ATTENTION):
        raise ValueError(
            f"{type(model).__name__} attends to another sequence (an encoder, cross-attention); only the cache of a decoder "
            "that attends to itself alone can be compressed"
        )
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{type(model).__name__} has latent attention (kv_lora_rank={config.kv_lora_rank}): it rebuilds keys and values "
            "itself, which a cache of packed rows cannot serve; run this model with the cache of transformers"
        )
    if artifact is not None:
        artifact.check(model, allow_finetuned=allow_finetuned)
    built = build(method, options)
    layers: list[CacheLayerMixin] = list(DynamicCache(config=config).layers)
    wrapped = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not wrapped:  # every layer slides: compress them all, and give back the pages that the window has left behind
        wrapped = [i for i, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    if not wrapped:
        raise ValueError(f"{type(model).__name__} has no attention layer with a plain key-value cache to compress")
    geometry = Geometry.of(config)
    plans = {i: built.plan(i, geometry, artifact) for i in wrapped}
    for plan in plans.values():
        plan.check(geometry.head_dim, model.dtype)  # before anything runs
    check_one_ledger(plans)
    windows = [layers[i].sliding_window for i in wrapped if isinstance(layers[i], DynamicSlidingWindowLayer)]
    rows = plans[wrapped[0]].rows(len(wrapped), max(windows, default=None))
    remedy = plans[wrapped[0]].rotation_remedy
    rotation = None if remedy is None else Rotation.of(model, remedy)
    for number, (i, plan) in enumerate(plans.items()):
        layers[i] = CompressedLayer(plan, rows, Place(number, seed, rotation))
    asks_ids = any(plan.asks_ids for plan in plans.values())
    speculative = any(plan.speculative for plan in plans.values()) and model.can_generate()
    guesses = Guesses(rows, layers) if speculative else None
    replays = graphs_for(model, rows, layers) if graphs else None
    attachment = Attachment(model, rows if asks_ids else None, guesses, graphs)
    origin = Origin(method, seed, options_asked(built), weakref.ref(model))
    cache = CompressedCache(layers, rows, origin, attachment, guesses, replays)
    if prefix is not None:
        try:
            load(cache, prefix, unseen_weights=allow_finetuned)
        except BaseException:
            cache.release()
            raise
    return cache
