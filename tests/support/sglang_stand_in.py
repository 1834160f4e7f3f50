"""Replacements for the SGLang classes that `calib/serve/sglang` imports, if SGLang is not installed; and host pools in its layouts.

The tests are the same with SGLang: they call the backend as `HiCacheController` of SGLang 0.5.23 does, with the same arguments and
expected results. `test_sglang_controller.py` runs that controller, if SGLang is installed.
"""

import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType

import torch

MODULE = "sglang.srt.mem_cache.hicache_storage"
INSTALLED = importlib.util.find_spec("sglang") is not None  # before `stand_in`


class HiCacheStorage(ABC):
    """The methods that a backend must have, and those that it inherits."""

    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...

    def batch_exists(self, keys, extra_info=None):
        """How many of the first keys exist, without a gap."""
        return next((at for at, key in enumerate(keys) if not self.exists(key)), len(keys))


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict | None = None


def stand_in() -> None:
    """Make `import sglang...hicache_storage` work; does nothing if SGLang is installed."""
    if INSTALLED:
        return
    parts = MODULE.split(".")
    for count in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    for content in (HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo):
        setattr(sys.modules[MODULE], content.__name__, content)


class HostPool:
    """Host memory for `pages` pages of keys and values in one of SGLang's layouts, filled with the number 7."""

    def __init__(self, layout, layers, heads, head_dim, page_size, pages, dtype=torch.float16):
        self.layout, self.layer_num, self.head_num, self.head_dim = layout, layers, heads, head_dim
        self.page_size, self.dtype = page_size, dtype
        slots = pages * page_size
        shape = {
            "layer_first": (2, layers, slots, heads, head_dim),
            "page_first": (2, slots, layers, heads, head_dim),
            "page_first_direct": (2, pages, layers, page_size, heads, head_dim),
            "page_head": (2, pages, heads, page_size, layers, head_dim),
        }[layout]
        self.kv_buffer = torch.full(shape, 7.0, dtype=dtype)

    def by_slot(self):
        """All slots `[2, layers, slots, heads, head_dim]`, computed independently of the code under test."""
        found = {
            "layer_first": lambda x: x,
            "page_first": lambda x: x.permute(0, 2, 1, 3, 4),
            "page_first_direct": lambda x: x.permute(0, 2, 1, 3, 4, 5).flatten(2, 3),
            "page_head": lambda x: x.permute(0, 4, 1, 3, 2, 5).flatten(2, 3),
        }[self.layout]
        return found(self.kv_buffer)

    def put(self, slot, chunk):
        """Write a chunk `[2, layers, tokens, heads * head_dim]` into the slots from `slot` on."""
        rows = chunk.unflatten(-1, (self.head_num, self.head_dim))
        for at in range(chunk.shape[2]):
            page, offset = divmod(slot + at, self.page_size)
            if self.layout == "layer_first":
                self.kv_buffer[:, :, slot + at] = rows[:, :, at]
            elif self.layout == "page_first":
                self.kv_buffer[:, slot + at] = rows[:, :, at]
            elif self.layout == "page_first_direct":
                self.kv_buffer[:, page, :, offset] = rows[:, :, at]
            else:
                self.kv_buffer[:, page, :, offset] = rows[:, :, at].transpose(1, 2)
