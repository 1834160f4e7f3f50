"""The model that a vLLM engine serves: checks whether its chunks can be stored, and identifies it."""

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from calib.runtime.artifact.fingerprint import stable
from calib.runtime.files import canonical_json
from calib.serve.fitted_model import FittedModel


def check(vllm_config: Any, kv_cache_config: Any, model: FittedModel) -> None:
    """Raises ValueError unless the engine serves the artifact's model, with plain attention and tensor parallelism only."""
    parallel, found = vllm_config.parallel_config, vllm_config.model_config
    others = (
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    if others != (1, 1, 1):
        raise ValueError(
            f"the engine has {others[0]} pipeline stages and context parallelism {others[1:]}, expected tensor parallelism alone; "
            "serve it with another connector"
        )
    groups = kv_cache_config.kv_cache_groups
    if (
        found.use_mla
        or found.uses_mrope
        or len(groups) != 1
        or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        or groups[0].kv_cache_spec.non_causal  # later tokens change a chunk, but not its key
    ):
        raise ValueError(
            "the model has latent attention, positions of several axes, or layers that attend to less than the whole text before a "
            "token or to more, expected plain attention in all layers; serve it with another connector"
        )
    has = found.get_num_layers(parallel), found.get_total_num_kv_heads(), found.get_head_size()
    wanted = model.layers, model.kv_heads, model.head_dim
    if has != wanted:
        raise ValueError(
            f"the engine's model has {has[0]} layers, {has[1]} KV heads and {has[2]} channels, the artifact's has {wanted[0]}, "
            f"{wanted[1]} and {wanted[2]}; give this model's artifact"
        )


def identity_of(vllm_config: Any, chunk: int) -> str:
    """Returns a hash of what a chunk's keys and values depend on in addition to tokens and codec: the model by its name, its
    revision, dtype, quantization and RoPE parameters, and the chunk's length."""
    found = vllm_config.model_config
    return canonical_json.sha256(
        stable(
            [
                found.model,
                found.revision,
                str(found.dtype),
                found.quantization,
                getattr(found.hf_text_config, "rope_parameters", None),
                chunk,
            ]
        )
    )
