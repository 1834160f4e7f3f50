"""SGLang's storage behind its hierarchical cache, `--hicache-storage-backend dynamic`: a file of `klt`'s codes for each page.

SGLang asks for whole pages by the hash of all tokens up to their end (`batch_exists`, `batch_get_v1`, `batch_set_v1`). A page that
is not there, damaged, or of another artifact or budget is a miss: the engine computes its tokens. Nothing of it has been
written to the engine's memory then.
"""

import logging
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo
from torch import Tensor

from calib.serve.blob_folder import BlobFolder
from calib.serve.fitted_model import FittedModel
from calib.serve.refusals import Refusals
from calib.serve.sglang.options import Options
from calib.serve.sglang.pages import Pages
from calib.serve.starts import Starts
from calib.serve.stored_chunks import StoredChunks

logger = logging.getLogger(__name__)

KEYS_AND_VALUES = "kv"  # SGLang's name of their pool
OTHER_INTERFACE = (
    'whole pages are asked for by batch_get_v1 and batch_set_v1; add "interface_v1": 1 to the extra config'
)


class Storage(HiCacheStorage):
    """Pages as files; SGLang makes it from `module_path` and `class_name` of the extra config.

    Args:
        config: SGLang's; `extra_config` has the fields of `Options` beside SGLang's own.
        kwargs: SGLang's, of which none is read.

    Raises ArtifactError and ValueError for wrong options, an artifact that cannot be used, latent attention and pipelines: the
    engine does not start.
    """

    def __init__(self, config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._options = options = Options.of(config.extra_config or {})
        if config.is_mla_model or config.pp_size > 1 or config.attn_cp_size > 1:
            raise ValueError(
                "the engine has latent attention, pipeline stages or context parallelism, expected plain attention and tensor "
                "parallelism alone; serve it with another backend"
            )
        self._model = FittedModel(options.artifact, options.bits, entropy=options.entropy, trellis=options.trellis)
        self._starts = Starts(self._options.positions or self._model.positions)
        self._rank, self._world = config.tp_rank, config.tp_size
        self._refusals = Refusals(logger, "calib refuses a page")
        self._identity = f"{self._model.identity} {config.model_name!r} {self._rank} {self._world}"
        self._pages: Pages | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the memory that pages are read from and written to, and makes the folder.

        Raises ValueError where the memory is not of this artifact's model, or the folder cannot be made.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = Pages(mem_pool_host, self._model.layers, self._model.head_dim)
        slices = self._model.slices
        self._codec = slices.codec(slices.of_rank(pages.heads, self._world, self._rank))
        identity = f"{self._identity} {pages.dtype}"  # a file is decoded to the dtype that it was coded from
        self._folder = BlobFolder(self._options.folder, identity, self._refusals)
        self._chunks = StoredChunks(self._codec, self._folder, self._refusals)
        self._pages = pages

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """SGLang names its pools. Raises ValueError for one beside keys and values, such as a draft model's, which has no codes."""
        if host_pool_name != KEYS_AND_VALUES:
            raise ValueError(
                f"the engine has a host pool {host_pool_name}, expected {KEYS_AND_VALUES} alone: what lies beside keys and values "
                "is not stored; serve without a draft model, or with another backend"
            )

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages that are not there yet.

        Args:
            keys: a page's hash each, of pages in a row.
            host_indices: the slots of their tokens in the host pool.
            extra_info: `prefix_keys`, the hashes of all pages before, tells where they begin; without it keys tell (`starts.py`).

        Returns whether each is stored. One is not whose keys fit no position, or have NaN: it is none of this model.
        """
        pages, before = self._registered(), self._before(extra_info)
        return [
            self._stored(key, pages.read(slot), None if before is None else before + at * pages.page)
            for at, (key, slot) in enumerate(zip(keys, self._slots(host_indices, pages), strict=True))
        ]

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Writes pages into the host pool, from the first on until one is missing; returns whether each is there."""
        pages, found = self._registered(), list[bool]()
        for key, slot in zip(keys, self._slots(host_indices, pages), strict=True):
            chunk = self._chunks.load(key, pages.page, pages.dtype) if all(found) else None
            if chunk is not None:
                pages.write(slot, chunk)
            found.append(chunk is not None)
        return found

    def exists(self, key: str) -> bool:
        """Whether the page's file is there; whether it can be used is seen when it is read."""
        self._registered()
        return self._folder.has(key)

    def clear(self) -> None:
        """Removes all pages of the folder, other engines' as well."""
        self._registered()
        self._folder.clear()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """As all of the interface without shapes, refused: `Options.of` asks for the other."""
        raise NotImplementedError(OTHER_INTERFACE)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        """Refused as `get` is."""
        raise NotImplementedError(OTHER_INTERFACE)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Refused as `get` is."""
        raise NotImplementedError(OTHER_INTERFACE)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Refused as `get` is."""
        raise NotImplementedError(OTHER_INTERFACE)

    def _registered(self) -> Pages:
        if self._pages is None:
            raise ValueError("no host pool is registered, expected SGLang's; call register_mem_pool_host first")
        return self._pages

    def _before(self, extra_info: HiCacheStorageExtraInfo | None) -> int | None:
        """Tokens before the first page of a batch, where SGLang tells."""
        prefix = None if extra_info is None else extra_info.prefix_keys
        return None if prefix is None else len(prefix) * self._registered().page

    @staticmethod
    def _slots(host_indices: Tensor, pages: Pages) -> list[int]:
        """The first slot of each page."""
        return host_indices[:: pages.page].tolist()

    def _stored(self, key: str, chunk: Tensor, start: int | None) -> bool:
        if self._folder.has(key):
            return True
        try:
            start = self._starts.of(self._codec, chunk) if start is None else start
        except ValueError as error:
            self._refusals.tell(error)
            return False
        return self._chunks.store(key, chunk, start)
