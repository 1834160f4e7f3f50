"""The `quantization_config` of a checkpoint's `config.json`, in the schema of compressed-tensors."""

from collections.abc import Mapping
from typing import Any

from calib.errors import UsageError
from calib.export.compressed_tensors.checkpoint import QUANTIZATION, Checkpoint
from calib.export.compressed_tensors.scales import Granularity
from calib.runtime.messages.printable import printable

METHOD = "compressed-tensors"
STRATEGIES: Mapping[Granularity, str] = {"tensor": "tensor", "head": "attn_head"}


def with_scales(checkpoint: Checkpoint, granularity: Granularity) -> dict[str, Any]:
    """Returns the checkpoint's configuration with a `kv_cache_scheme`: keys and values in fp8, scales of this granularity.

    Raises `UsageError` for weights quantised by another library, whose configuration cannot describe the scales, and for a
    checkpoint that already has a `kv_cache_scheme`.
    """
    scheme = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": STRATEGIES[granularity],
        "dynamic": False,
        "group_size": None,
    }
    present = checkpoint.quantization
    if present is None:
        # No weight is quantised, but vLLM needs `config_groups` to be present before it gives its loader the number of heads.
        present = {
            "config_groups": {},
            "format": "dense",
            "ignore": [],
            "quant_method": METHOD,
            "quantization_status": "frozen",
        }
    elif present.get("quant_method") != METHOD:
        raise UsageError(
            f"the model is quantised by {printable(present.get('quant_method'))}, expected plain weights or {printable(METHOD)}; "
            "export the model it was made from"
        )
    elif present.get("kv_cache_scheme"):
        raise UsageError(
            "the model has scales of keys and values already (kv_cache_scheme), expected none; export the model it was "
            "made from"
        )
    kept = {key: value for key, value in checkpoint.config.items() if key not in QUANTIZATION}
    return {**kept, "quantization_config": {**present, "kv_cache_scheme": scheme}}
