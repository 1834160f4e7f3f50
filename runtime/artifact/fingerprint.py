"""The fingerprint of the model that an artifact belongs to: its configuration, and hashes of a sample of its key and value weights.

An artifact of another model would run and give bad answers; so the first difference raises an error.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calib.runtime.files import canonical_json
from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.messages.printable import printable, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROJECTIONS = frozenset({"k_proj", "v_proj", "qkv_proj", "query_key_value", "W_pack", "Wqkv"})
ROWS = 8  # rows sampled of each projection: a fine-tuned relative differs in nearly every row
# Artifacts are fitted in one dtype and used in another, and rounding changes the bits. One hash for each rounding of
# the weights in memory: a bfloat16 model and the float32 model it was cast from agree in the bfloat16 hash, a float16
# and a bfloat16 model loaded from a bfloat16 file agree in the float16 one. So weights match when any hash is equal.
ROUNDINGS: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Fields of a configuration that do not change keys and values: where it came from, how it is run, what it is padded
# with. Fields with a leading underscore (_name_or_path, _attn_implementation) are left out as well.
VOLATILE = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_return_dict",
    }
)

# Upper limits, a hundred times what models have; what is allocated by them (a page, a table) stays small.
NUMBERS: Mapping[str, int] = {
    "layers": 4096,
    "kv_heads": 65_536,
    "head_dim": 65_536,
    "heads": 65_536,
    "vocab_size": 2**31 - 1,
}
FIELDS = ("architecture", *NUMBERS, "rope", "config_hash", "weights")  # in the order they are compared
SHA256 = re.compile("[0-9a-f]{64}")
LONGEST = 60  # characters of a value in a comparison
OTHER_MODEL = "load the model this artifact was fitted on, or run `calib fit` on this one"


def fingerprint(model: "PreTrainedModel") -> dict[str, Any]:
    """Returns the fingerprint of a causal language model, as plain JSON.

    architecture: the configuration's model type. layers, heads, kv_heads, head_dim, vocab_size: integers. rope: its
    parameters or None. config: the text model's configuration without volatile fields; config_hash: its SHA-256.
    weights: SHA-256 of sampled rows of the key and value projections, one for each rounding in `ROUNDINGS`, each
    None where they cannot be read (quantised by a library).

    Raises `ArtifactError` for a model without key and value projections or without a usual configuration.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    result = {
        "architecture": config.model_type,
        "layers": getattr(config, "num_hidden_layers", None),
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None),
        "vocab_size": config.vocab_size,
        "rope": stable(getattr(config, "rope_parameters", None)),
        "config": stable(config.to_dict()),
        "weights": weight_hashes(model),
    }
    result["config_hash"] = canonical_json.sha256(result["config"])
    check_fields(result)
    return result


def stable(value: Any) -> Any:
    """A configuration value as plain JSON, without volatile fields and without those that are None.

    A field that a newer transformers adds is None if it is not used; it must not change an old model's hash.
    """
    if isinstance(value, Mapping):
        kept = {str(key): stable(entry) for key, entry in value.items() if entry is not None}
        return {key: entry for key, entry in kept.items() if key not in VOLATILE and not key.startswith("_")}
    if isinstance(value, list | tuple):
        return [stable(entry) for entry in value]
    # JSON has no infinite numbers, such as Mamba 2's limit when it is unlimited.
    plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def weight_hashes(model: torch.nn.Module) -> dict[str, str | None]:
    """SHA-256 of `ROWS` rows of every key and value projection, rounded to each dtype of `ROUNDINGS`."""
    hashes = {name: hashlib.sha256() for name in ROUNDINGS}
    for name, weight in projections(model):
        if weight is None:
            return dict.fromkeys(ROUNDINGS)
        rows = weight.shape[0]
        chosen = sorted({index * (rows - 1) // (ROWS - 1) for index in range(ROWS)})
        sample = weight.detach()[chosen].to("cpu", torch.float32)
        for rounding, dtype in ROUNDINGS.items():
            hashes[rounding].update(f"{name} {list(weight.shape)}\n".encode())
            hashes[rounding].update(sample.to(dtype).contiguous().view(torch.uint8).numpy().data)
    return {name: value.hexdigest() for name, value in hashes.items()}


def projections(model: torch.nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Name and weight [out, in] of every key and value projection, fused ones whole; None for an unreadable weight."""
    found = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    found = [(name, module) for name, module in found if name in PROJECTIONS]
    if not found:
        raise ArtifactError(
            f"{type(model).__name__} has no key and value projections, expected modules named "
            f"{', '.join(sorted(PROJECTIONS))}; use a decoder-only model of transformers"
        )
    for name, module in found:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            weight = offloaded(module)
        readable = (
            isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point() and not weight.is_meta
        )
        yield name, weight if readable else None


def offloaded(module: torch.nn.Module) -> Tensor | None:
    """The weight that accelerate keeps in host memory or on disk until `module` runs; None if there is none."""
    held = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    return None if held is None else held["weight"]


def check_fields(found: Mapping[str, Any]) -> None:
    """Raises `ArtifactError` if a fingerprint lacks a field or a field has a wrong type or value."""
    for field in (*FIELDS, "config"):
        if field not in found:
            raise ArtifactError(f"the fingerprint has no field {field!r}, expected {', '.join(FIELDS)}; {FIT_AGAIN}")
    for field, most in NUMBERS.items():
        if type(found[field]) is not int or not 1 <= found[field] <= most:
            raise ArtifactError(
                f"the fingerprint field {field!r} is {printable(found[field])}, expected a whole number from 1 to {most}; "
                f"{OTHER_MODEL}"
            )
    weights = found["weights"]
    types = (
        isinstance(found["architecture"], str)
        and isinstance(found["rope"], dict | None)
        and isinstance(found["config"], dict)
        and found["config_hash"] == canonical_json.sha256(found["config"])
        and isinstance(weights, dict)
        and weights.keys() == ROUNDINGS.keys()
        and all(value is None or (isinstance(value, str) and SHA256.fullmatch(value)) for value in weights.values())
    )
    if not types:
        raise ArtifactError(
            f"the fingerprint's architecture, rope, config, config_hash or weights are malformed; {FIT_AGAIN}"
        )


def compare(fitted: Mapping[str, Any], running: Mapping[str, Any], allow_finetuned: bool = False) -> None:
    """Raises `ArtifactError` naming the first field of `FIELDS` in which the running model differs from the fitted one."""
    for field in FIELDS[:-1]:
        if fitted[field] == running[field]:
            continue
        expected, found = fitted[field], running[field]
        if field in ("rope", "config_hash"):
            name = "rope" if field == "rope" else "config"
            expected, found = first_difference(fitted[name] or {}, running[name] or {})
        raise ArtifactError(
            f"{field} differs: this model has {shortened(str(found), LONGEST)}, the artifact expects "
            f"{shortened(str(expected), LONGEST)}; {OTHER_MODEL}"
        )
    weights, expected_weights = running["weights"], fitted["weights"]
    if allow_finetuned or any(weights[name] == expected_weights[name] is not None for name in ROUNDINGS):
        return
    for owner, hashes in (("this model", weights), ("the fitted model", expected_weights)):
        if hashes["float32"] is None:
            raise ArtifactError(
                f"weights of {owner} cannot be compared (quantised or offloaded), expected plain ones; "
                "pass allow_finetuned=True if you know them to be the same, or run `calib fit` on this model"
            )
    raise ArtifactError(
        f"weights differ: this model's key and value projections hash to {weights['float32'][:12]}, the artifact "
        f"expects {expected_weights['float32'][:12]}, and the configuration is the same: a fine-tuned relative, or a "
        "float32 file loaded as float16 here and bfloat16 there; pass allow_finetuned=True to use it all the same, or "
        "run `calib fit` on this model"
    )


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, str]:
    """The first key in which two mappings differ, as `key = value` of both, each in at most 60 characters."""
    for key in sorted(expected.keys() | found.keys()):
        pair = [f"{key} = {canonical_json.dumps(side[key]) if key in side else 'absent'}" for side in (expected, found)]
        if pair[0] != pair[1]:
            return shortened(pair[0], LONGEST), shortened(pair[1], LONGEST)
    return "nothing of it", "nothing of it"
