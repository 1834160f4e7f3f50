"""SGLang's own cache controller on a CPU, with its own host pool, for the tests that run if SGLang can be imported.

SGLang's image code imports torchvision, whose wheels fit torch's of another index only; the cache needs none of it, so a
replacement does. A CPU has no memory to register with CUDA: the host pool's memory comes from torch.
"""

import importlib.util
import json
import sys
import threading
from array import array
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch
from sglang_stand_in import INSTALLED, HostPool

with pytest.MonkeyPatch.context() as patch:
    if INSTALLED and importlib.util.find_spec("torchvision") is None:
        for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
            patch.setitem(sys.modules, "torchvision" + name, MagicMock(__spec__=None))
    for name in ("server_args", "mem_cache.hybrid_cache.hybrid_pool_assembler"):
        pytest.importorskip(
            "sglang.srt." + name,
            reason="SGLang and what it imports are not installed (make sglang)",
            exc_type=ImportError,
        )

from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_group
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_memory, get_parallel
from sglang.srt.server_args import ServerArgs

__all__ = ["Engine", "HybridCacheController", "ServerArgs", "engine_of"]

SECONDS = 60  # for an answer of the controller's threads


class Engine:
    """The part of an engine between its radix tree and the storage backend.

    Args:
        layout, layers, heads, head_dim, page: layout and shape of the host pool.
        tokens: size of the pool on the device; the host pool is twice as large.
        text: the extra config, as the command line passes it.

    Attributes:
        pools, host, controller, backend: SGLang's host pool group, its pool of keys and values, the controller, our backend.
        seen: the host pool's memory as the stand-in of the other tests has it.
    """

    def __init__(self, layout, layers, heads, head_dim, page, tokens, text):
        device = MHATokenToKVPool(
            tokens, page, torch.float16, heads, head_dim, layers, "cpu", enable_memory_saver=False
        )
        slots = TokenToKVPoolAllocator(tokens, dtype=torch.float16, device="cpu", kvcache=device, need_sort=False)
        self.page = page
        self.pools = build_kv_only_group(
            page_size=page, kv_pool=device, full_layer_mapping={at: at for at in range(layers)}, use_mla=False
        )
        self.host = host = self.pools.anchor_entry.host_pool
        self.seen = HostPool(layout, layers, heads, head_dim, page, host.page_num)
        assert host.kv_buffer.shape == self.seen.kv_buffer.shape and host.layout == layout
        self.seen.kv_buffer = host.kv_buffer
        extra, threshold, *_, self.passes_prefix_keys = HybridCacheController.parse_storage_backend_extra_config(text)
        self.controller = HybridCacheController(
            slots,
            self.pools,
            page,
            torch.distributed.group.WORLD,
            threading.Event(),
            write_policy=get_memory().hicache_write_policy,
            io_backend=get_memory().hicache_io_backend,
            storage_backend=get_memory().hicache_storage_backend,
            prefetch_threshold=threshold,
            model_name="my-llama",
            storage_backend_extra_config=extra,
        )

    @property
    def backend(self):
        return self.controller.storage_backend

    def hashes(self, count):
        """The keys of the first `count` pages of a text, as SGLang's tree computes them, and the text's tokens."""
        tokens = RadixKey(array("q", range(count * self.page)))
        return get_storage_hash_str(tokens, None, page_size=self.page), tokens

    def backed_up(self, slots, first=0):
        """Stores the pages in `slots`, page `first` of the text and later ones; returns how many tokens were stored."""
        keys, tokens = self.hashes(first + len(slots) // self.page)
        before = keys[:first] if self.passes_prefix_keys else None
        self.controller.write_storage(slots, tokens[first * self.page :], keys[first:], before)
        return self.controller.ack_backup_queue.get(timeout=SECONDS).completed_tokens

    def prefetched(self, pages):
        """Loads the first pages of a text into new slots; returns the slots and the number of tokens found and loaded."""
        operation = self.controller.prefetch(CacheRequestHandle("request", 0), self.hashes(pages)[1], None, [])
        found = self.controller.prefetch_hit_queue.get(timeout=SECONDS)
        assert found is operation
        found.host_indices, loaded = self.pools.alloc(pages * self.page), 0
        self.controller.prefetch_buffer.put(found)
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=SECONDS)).completed_req:
            loaded = ack.completed_tokens
        return found.host_indices, found.storage_hit_count, loaded


@contextmanager
def engine_of(monkeypatch, layout, shape, extra, batch=2):
    """An `Engine` of a host pool of `shape` (layers, heads, head_dim, page, tokens), which passes `batch` pages at a time."""
    monkeypatch.setitem(common.ALLOC_MEMORY_FUNCS, "cpu", lambda dims, dtype, **_: torch.full(dims, 7, dtype=dtype))
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", batch)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    text = json.dumps(extra)
    published = get_context().override_server_args(
        hicache_mem_layout=layout,
        hicache_ratio=2.0,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=text,
    )
    try:
        with (
            published,
            get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0),
        ):
            engine = Engine(layout, *shape, text)
            try:
                yield engine
            finally:
                engine.controller.detach_storage_backend()
    finally:
        torch.distributed.destroy_process_group()
