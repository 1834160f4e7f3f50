"""Implements vLLM's `KVConnectorBase_V1`, for `"kv_connector_module_path": "calib.serve.vllm.connector"` and
`"kv_connector": "CalibConnector"`.

The scheduler and every worker have a connector; their parts are in `scheduler_side.py` and `worker_side.py`. A chunk that is
missing, damaged, or of another artifact or budget is a miss: the engine computes its tokens.
"""

import logging
from contextlib import suppress
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from calib.serve.blob_folder import BlobFolder
from calib.serve.fitted_model import FittedModel
from calib.serve.refusals import Refusals
from calib.serve.stored_chunks import StoredChunks
from calib.serve.vllm.cpu_order import cpu_order
from calib.serve.vllm.options import Options
from calib.serve.vllm.paged_memory import PagedMemory
from calib.serve.vllm.scheduler_side import SchedulerSide
from calib.serve.vllm.served_model import check, identity_of
from calib.serve.vllm.transfers import Transfers
from calib.serve.vllm.worker_side import WorkerSide

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's logger, which has handlers


class CalibConnector(KVConnectorBase_V1):
    """Stores the prefixes of one engine as files.

    Args:
        vllm_config: vLLM's configuration; `kv_connector_extra_config` has the fields of `Options`.
        role: SCHEDULER or WORKER.
        kv_cache_config: vLLM's configuration of the KV cache.

    Raises ArtifactError or ValueError for wrong options, an artifact of another model, and anything but plain attention under
    tensor parallelism; then the engine does not start.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.of(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy}, expected recompute: a damaged file would fail its "
                'request; add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
            )
        self._model = FittedModel(options.artifact, options.bits, entropy=options.entropy, trellis=options.trellis)
        check(vllm_config, kv_cache_config, self._model)
        self._block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._chunk = options.tokens(self._block)
        self._refusals = Refusals(logger, "calib refuses a chunk")
        self._folder = BlobFolder(options.folder, self._model.identity, self._refusals)
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        slices = dict.fromkeys(self._heads(rank) for rank in range(self._ranks))
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._folder,
                slices,
                identity_of(vllm_config, self._chunk),
                self._chunk,
                self._block,
                transfer.is_kv_consumer,
                transfer.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False, since tokens that are not stored are computed again."""
        return False

    # Called in the scheduler.

    def on_new_request(self, request: Any) -> None:
        """Tracks the request, so that its chunks are stored even if vLLM never looks up stored tokens for it."""
        self._scheduler.follow(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns the number of stored tokens after the computed ones, and whether they are loaded asynchronously (if any)."""
        found = self._scheduler.stored(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load of `num_external_tokens` tokens into the request's blocks."""
        if num_external_tokens:
            (own,) = blocks.get_block_ids()
            self._scheduler.load(request, own, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """Returns the chunks that workers load and store in this step."""
        state = scheduler_output.kv_connector_block_state
        return self._scheduler.step(scheduler_output.num_scheduled_tokens, lambda name: state.get_block_ids(name)[0])

    def update_connector_output(self, connector_output: Any) -> None:
        """Records the loads that failed or finished."""
        self._scheduler.failed(connector_output.invalid_block_ids or ())
        self._scheduler.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Stops tracking the request; its blocks can be freed at once, since a store copies them."""
        self._scheduler.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Removes all chunks of the folder, including those of other engines."""
        self._scheduler.clear()
        return True

    # Called in the workers.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Registers the paged memory of all layers. Raises ValueError if it does not fit the artifact's model."""
        heads, (name, first) = self._heads(get_tensor_model_parallel_rank()), next(iter(kv_caches.items()))
        order = None
        if first.device.type == "cpu":
            layer = self._vllm_config.compilation_config.static_forward_context[name]
            order = cpu_order(layer.isa, first.shape[-2], self._model.head_dim, first.dtype)
        memory = PagedMemory(kv_caches, self._model.layers, len(heads), self._model.head_dim, self._block, order)
        stored = StoredChunks(self._model.slices.codec(heads), self._folder, self._refusals)
        self._worker = WorkerSide(stored, memory, heads, self._chunk)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads that the scheduler planned, after a clear if there was one."""
        planned = self._planned()
        if planned.cleared:  # weights may have changed: drop waiting chunks, and remove those stored meanwhile
            self._side().drop()
            with suppress(OSError):  # `reset_cache` has reported what cannot be removed
                self._folder.clear()
        for name, chunks in planned.loads.items():
            self._side().load(name, chunks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: chunks are not loaded during a forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a chunk has all layers and is stored after the forward."""

    def wait_for_save(self) -> None:
        """Copies the chunks that this step's forward has filled, and queues them for storing."""
        for chunk in self._planned().stores:
            self._side().store(chunk)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Returns (None, the requests whose loads are finished)."""
        return None, self._side().finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks that could not be loaded because a chunk was missing or damaged."""
        return self._side().failed()

    def shutdown(self) -> None:
        """Waits until everything is stored. An engine shuts down its workers first, then its scheduler."""
        if self._worker is not None:
            self._worker.close()
        if self._role == KVConnectorRole.SCHEDULER:
            with suppress(OSError):  # `reset_cache` has reported what cannot be removed
                self._scheduler.close()

    def _heads(self, rank: int) -> range:
        """Returns the KV heads of a rank; if there are more ranks than heads, several ranks share one head."""
        return self._model.slices.of_rank(max(1, self._model.kv_heads // self._ranks), self._ranks, rank)

    def _side(self) -> WorkerSide:
        if self._worker is None:
            raise ValueError("no memory is registered, expected vLLM's; call register_kv_caches first")
        return self._worker

    def _planned(self) -> Transfers:
        found = self._get_connector_metadata()
        assert isinstance(found, Transfers)
        return found
