"""`compress(model, method=...)`: builds the cache of a method for a model and attaches calib's attention to the model."""

import os
import weakref
from typing import Any

from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.attachment import Attachment
from calib.runtime.cache import CompressedCache
from calib.runtime.completed import completed
from calib.runtime.graphs.step_graphs import graphs_for
from calib.runtime.layer import CompressedLayer
from calib.runtime.messages.printable import printable
from calib.runtime.methods import Geometry, build, check_rope, options_asked
from calib.runtime.methods.tuned import check_one_sequence_state
from calib.runtime.offload.speculator import Speculator
from calib.runtime.prefix.prefix import Origin, load
from calib.runtime.rotation import Rotation
from calib.runtime.stages.codec.unserved import warn_unserved
from calib.runtime.store import LayerContext
from calib.runtime.unserved_model import why_unserved


def compress(
    model: PreTrainedModel,
    method: str,
    artifact: Artifact | None = None,
    *,
    seed: int = 0,
    allow_finetuned: bool = False,
    graphs: bool = False,
    prefix: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> CompressedCache:
    """Returns an empty cache of `method` for `model.generate(past_key_values=cache)`, or for any forward of the model.

    Use it as `with compress(...) as cache:`, or call `cache.release()` at the end; then the model is exactly as it was.
    Several caches may be attached to one model.

    Args:
        model: a decoder of transformers whose attention goes through its attention interface.
        method: a name from `calib methods`.
        artifact: the artifact that `calib fit` wrote for this model; None for methods that need no statistics.
        seed: seed of methods that use random numbers (probes, starts of iterations); the same seed gives the same bits.
        allow_finetuned: accept an artifact of a fine-tuned relative, and a prefix whose weights cannot be compared.
        graphs: on a GPU, replay decode steps from CUDA graphs, one launch a step.
        prefix: a file of `cache.save`, whose tokens the cache begins with. Model, method, options, seed and artifact must be the
            same as when it was saved; for a file saved with `storage_bits`, only the model and the artifact.
        tokenizer: the model's tokenizer, for methods that need the ids of special tokens (`zipcache` with `probes="special"`).
        options: the method's own, such as `bits=2`; or `tuned=2.5` alone, for the options that `calib tune` chose for that
            budget and wrote into the artifact.

    Raises:
        ValueError: unknown method or option, or options that do not fit the model.
        ArtifactError: an artifact of another model (a ValueError).
        PrefixError: a prefix of another model, method or artifact (a ValueError).
    """
    if not isinstance(model, PreTrainedModel):
        compiled = isinstance(getattr(model, "_orig_mod", None), PreTrainedModel)  # torch.compile(model) is a wrapper
        advice = "pass model._orig_mod, or compile in place: model.compile()" if compiled else "pass the model itself"
        raise ValueError(f"model must be a model of transformers, got {type(model).__name__}; {advice}")
    if artifact is not None and not isinstance(artifact, Artifact):
        raise ValueError(
            f"artifact must be an Artifact, got {printable(artifact)}; "
            "Artifact.load(path) or Artifact.from_pretrained(name) gives one"
        )
    for name, flag in (("graphs", graphs), ("allow_finetuned", allow_finetuned)):
        if type(flag) is not bool:
            raise ValueError(f"{name} must be True or False, got {printable(flag)}")
    if type(seed) is not int:
        raise ValueError(f"seed must be a whole number, got {printable(seed)}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, so its cache cannot be compressed"
        )
    if reason := why_unserved(model):
        raise ValueError(reason)
    config = model.config.get_text_config(decoder=True)
    if artifact is not None:
        artifact.check(model, allow_finetuned=allow_finetuned)
    built = build(method, options)
    layers: list[CacheLayerMixin] = list(DynamicCache(config=config).layers)
    wrapped = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not wrapped:  # every layer has a sliding window: compress all, and free pages behind it
        wrapped = [i for i, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    if not wrapped:
        hybrid = "hybrid" in (getattr(config, "layer_types", None) or ())
        has = "a recurrent state in every attention layer" if hybrid else "no attention layer"
        raise ValueError(
            f"{type(model).__name__} has {has}, and so no plain key-value cache to compress; run it with the cache of transformers"
        )
    geometry = Geometry.of(config)
    check_rope(method, model)
    plans = completed({i: built.plan(i, geometry, artifact) for i in wrapped}, model, tokenizer)
    for plan in plans.values():
        plan.check(geometry.head_dim, model.dtype)  # before anything runs
    check_one_sequence_state(plans)
    for plan in plans.values():
        warn_unserved(plan.codecs(), plan.before_rope)
    windows = [layers[i].sliding_window for i in wrapped if isinstance(layers[i], DynamicSlidingWindowLayer)]
    sequences = plans[wrapped[0]].sequences(len(wrapped), max(windows, default=None))
    remedy = plans[wrapped[0]].needs_rope
    rotation = None if remedy is None else Rotation.of(model, remedy)
    for number, (i, plan) in enumerate(plans.items()):
        layers[i] = CompressedLayer(plan, sequences, LayerContext(number, seed, rotation))
    needs_token_ids = any(plan.needs_token_ids for plan in plans.values())
    speculative = any(plan.speculative for plan in plans.values()) and model.can_generate()
    speculator = Speculator(sequences, layers) if speculative else None
    replays = graphs_for(model, sequences, layers) if graphs else None
    attachment = Attachment(model, sequences if needs_token_ids else None, speculator, graphs)
    origin = Origin(method, seed, options_asked(built), weakref.ref(model), artifact)
    cache = CompressedCache(layers, sequences, origin, attachment, speculator, replays)
    if prefix is not None:
        try:
            load(cache, prefix, unseen_weights=allow_finetuned)
        except BaseException:
            cache.release()
            raise
    return cache
