"""Storage backends as SGLang's controller makes them, host pools of a toy model, and chunks for their pages."""

import torch
from placed_chunks import placed
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang_stand_in import HostPool

from calib.runtime import Codec
from calib.serve.sglang.backend import Storage

LAYERS, HEADS, D, PAGE, BITS = 2, 2, 32, 32, 3
KEYS = ["aa", "bb", "../cc"]


def config(path, into, rank=0, ranks=1, **fields):
    own = {"artifact": path, "folder": str(into), "bits": BITS, "positions": 1024, "interface_v1": 1}
    theirs = {"backend_name": "calib", "module_path": "calib.serve.sglang.backend", "class_name": "Storage"}
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=fields.pop("pp_size", 1),
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=fields.pop("is_mla_model", False),
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=fields.pop("model_name", "my-llama"),
        extra_config={name: value for name, value in {**theirs, **own, **fields}.items() if value is not None},
    )


def storage(path, into, pool, **fields):
    found = Storage(config(path, into, **fields), {})
    found.register_mem_pool_host(pool)
    return found


def pool_of(layout="layer_first", heads=HEADS, pages=5, dtype=torch.float16):
    return HostPool(layout, LAYERS, heads, D, PAGE, pages, dtype)


def slots(*pages):
    """Slot numbers as SGLang passes them: one for each token, of pages in any order."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def texts(artifact, first, count=3, dtype=torch.float16):
    """Chunks of one page each, for `count` consecutive pages from position `first` on."""
    codec = Codec.from_artifact(artifact, bits=BITS)
    return [placed(artifact, codec, PAGE, first + at * PAGE, dtype, at) for at in range(count)]


def told(pages):
    return HiCacheStorageExtraInfo(prefix_keys=[f"before-{at}" for at in range(pages)])
