"""Storage backend of SGLang's hierarchical cache (`--hicache-storage-backend dynamic`): a file of `klt`'s codes for each page.

SGLang requests whole pages by the hash of all tokens up to their end (`batch_exists`, `batch_get_v1`, `batch_set_v1`). A page that
is missing, damaged, or of another artifact or budget is a miss: nothing of it is written to the engine's memory, and the engine
computes its tokens.
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
from calib.serve.sglang.releases import reports_every_page
from calib.serve.starts import Starts
from calib.serve.stored_chunks import StoredChunks

logger = logging.getLogger(__name__)

KEYS_AND_VALUES = "kv"  # SGLang's name of the pool of keys and values
OTHER_INTERFACE = (
    'this function moves bytes without a shape, expected batch_get_v1 and batch_set_v1; add "interface_v1": 1 to the extra '
    "config"
)


class Storage(HiCacheStorage):
    """Stores pages as files; SGLang finds this class by `module_path` and `class_name` of the extra config.

    Args:
        config: SGLang's configuration; its `extra_config` has the fields of `Options` in addition to SGLang's own.
        kwargs: SGLang's arguments, which are not used.

    Raises ArtifactError or ValueError for wrong options, an unusable artifact, latent attention, pipeline stages and context
    parallelism; then the engine does not start.
    """

    def __init__(self, config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._options = options = Options.of(config.extra_config or {})
        if config.is_mla_model or config.pp_size > 1 or config.attn_cp_size > 1:
            raise ValueError(
                "the engine has latent attention, pipeline stages or context parallelism, expected plain attention and tensor "
                "parallelism alone; serve it with another backend"
            )
        self._model = FittedModel(options.artifact, options.bits, entropy=options.entropy, trellis=options.trellis)
        self._starts = Starts(self._model.longest(options.positions))
        self._rank, self._world = config.tp_rank, config.tp_size
        self._refusals = Refusals(logger, "calib refuses a page")
        self._identity = f"{self._model.identity} {config.model_name!r} {self._rank} {self._world}"
        self._pages: Pages | None = None
        self._reported = reports_every_page()
        self._longest = 0  # pages of the longest batch so far
        self._behind = 0  # end of the previous batch, if it began at 0 and may go on; else 0

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the host memory that pages are read from and written to, and makes the folder.

        Raises ValueError if the memory does not fit the artifact's model, or if the folder cannot be made.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = Pages(mem_pool_host, self._model.layers, self._model.head_dim)
        slices = self._model.slices
        self._codec = slices.codec(slices.of_rank(pages.heads, self._world, self._rank))
        identity = f"{self._identity} {pages.dtype}"  # a file can be decoded only to the dtype of its original
        self._folder = BlobFolder(self._options.folder, identity, self._refusals)
        self._chunks = StoredChunks(self._codec, self._folder, self._refusals)
        self._pages = pages

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Checks the name of a pool. Raises ValueError for a pool other than keys and values (such as a draft model's, or that
        of sliding windows), which cannot be encoded."""
        if host_pool_name != KEYS_AND_VALUES:
            raise ValueError(
                f"the engine has a host pool {host_pool_name}, expected {KEYS_AND_VALUES} alone: what lies beside keys and values "
                "is not stored; serve without a draft model, with --disable-hybrid-swa-memory if windows slide, or with another "
                "backend"
            )

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores the pages that are not stored yet, and returns for each page whether it is stored.

        Args:
            keys: the hashes of successive pages.
            host_indices: the slots of their tokens in the host pool.
            extra_info: its `prefix_keys`, the hashes of all earlier pages, give the position of the first page; without them the
                positions are found from the pages' keys (`starts.py`).

        A page whose keys fit no position, or have NaN, is not stored.
        """
        pages, slots = self._registered(), self._slots(host_indices, self._registered())
        try:
            before = self._before(pages, slots, extra_info)
        except ValueError as error:
            self._refusals.tell(error)
            return [self._folder.has(key) for key in keys]
        return [
            self._stored(key, pages.read(slot), None if before is None else before + at * pages.page)
            for at, (key, slot) in enumerate(zip(keys, slots, strict=True))
        ]

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Writes pages into the host pool, from the first until one is missing; returns for each page whether it was written."""
        pages, found = self._registered(), list[bool]()
        for key, slot in zip(keys, self._slots(host_indices, pages), strict=True):
            chunk = self._chunks.load(key, pages.page, pages.dtype) if all(found) else None
            if chunk is not None:
                pages.write(slot, chunk)
            found.append(chunk is not None)
        return found

    def exists(self, key: str) -> bool:
        """Whether the page's file exists; its content is not checked."""
        self._registered()
        return self._folder.has(key)

    def clear(self) -> None:
        """Removes all pages of the folder, including those of other engines."""
        self._registered()
        self._folder.clear()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Raises NotImplementedError, as all functions of the interface without shapes do; `Options.of` requires the other one."""
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

    def _before(self, pages: Pages, slots: list[int], extra_info: HiCacheStorageExtraInfo | None) -> int | None:
        """Returns the number of tokens before the first page of a batch to store; None if SGLang does not report them.

        SGLang stores a long text in batches of equally many pages. Before 0.5.21 it reports for none of them that earlier pages
        exist if there are none before the first. So if a batch at 0 is as long as any, the next one is either the rest of its text
        or another text, which the keys of its first page tell. Raises ValueError if they do not.
        """
        prefix = None if extra_info is None else extra_info.prefix_keys
        behind, self._behind = self._behind, 0
        self._longest = max(self._longest, len(slots))
        if prefix is None or prefix or self._reported or not slots:
            return None if prefix is None else len(prefix) * pages.page
        start = self._codec.start_of(pages.read(slots[0]), [0, behind]) if behind else 0
        if len(slots) == self._longest:
            self._behind = start + len(slots) * pages.page
        return start

    @staticmethod
    def _slots(host_indices: Tensor, pages: Pages) -> list[int]:
        """Returns the first slot of each page."""
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
