"""Replacements for the vLLM classes and functions that `calib/serve/vllm` imports, if vLLM is not installed.

The tests are the same with vLLM: they call the connector as the scheduler and workers of vLLM 0.32 and 0.33 do, with the same
arguments.
"""

import importlib.util
import sys
from abc import ABC
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import torch

KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024
    pass


class KVConnectorBase_V1(ABC):  # noqa: B024
    """The methods that a connector inherits."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._connector_metadata = None

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


class CacheHitSource(str, Enum):  # noqa: UP042
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    non_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int


def cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, **kwargs):
    """Write keys and values into blocks laid out for x86 processors: of each head, keys `[D, tokens]`, values `[tokens, D]`."""
    heads, channels = key.shape[1:]
    for at, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, key_cache.shape[2])
        for head in range(heads):
            key_cache[block, head].view(channels, -1)[:, offset] = key[at, head]
            value_cache[block, head, offset] = value[at, head]


def stand_in() -> None:
    """Make `import vllm...` work; does nothing if vLLM is installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    contents = {
        KV_CONNECTOR: (KVConnectorRole, KVConnectorMetadata, KVConnectorBase_V1),
        "vllm.distributed.parallel_state": (get_tensor_model_parallel_rank,),
        "vllm.v1.metrics.cache_hit_source": (CacheHitSource,),
        "vllm.v1.kv_cache_interface": (FullAttentionSpec, SlidingWindowSpec),
        "vllm._custom_ops": (cpu_attn_reshape_and_cache,),
    }
    for name, own in contents.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in sys.modules:
                sys.modules[path] = ModuleType(path)
                if count > 1:
                    setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], sys.modules[path])
        for content in own:
            setattr(sys.modules[name], content.__name__, content)


def get_tensor_model_parallel_rank():
    return 0
