"""vLLM's `KVConnectorBase_V1`: an engine gives `"kv_connector_module_path": "calib.serve.vllm.connector"` and
`"kv_connector": "CalibConnector"`.

The scheduler and every worker have one; `scheduler_side.py` and `worker_side.py` say what each does. A chunk that is not there,
damaged, or of another artifact or budget is a miss: the engine computes its tokens.
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

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's own, which has handlers


class CalibConnector(KVConnectorBase_V1):
    """Prefixes as files, for one engine.

    Args:
        vllm_config: vLLM's; `kv_connector_extra_config` has the fields of `Options`.
        role: SCHEDULER or WORKER.
        kv_cache_config: vLLM's.

    Raises ArtifactError and ValueError for wrong options, an artifact that is not this model's, and what is no plain attention
    under tensor parallelism: the engine does not start.
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
        """No: what is not stored is computed again."""
        return False

    # The scheduler's.

    def on_new_request(self, request: Any) -> None:
        """Follows it, so that it is stored as well where nothing is looked up."""
        self._scheduler.follow(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that are stored behind those, and whether they are loaded between steps: whenever there are any."""
        found = self._scheduler.stored(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load of so many tokens into the request's blocks."""
        if num_external_tokens:
            (own,) = blocks.get_block_ids()
            self._scheduler.load(request, own, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """What workers load and store in this step."""
        state = scheduler_output.kv_connector_block_state
        return self._scheduler.step(scheduler_output.num_scheduled_tokens, lambda name: state.get_block_ids(name)[0])

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes note of loads that failed, and of those that are done."""
        self._scheduler.failed(connector_output.invalid_block_ids or ())
        self._scheduler.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forgets it; its blocks are free, since a store copies them."""
        self._scheduler.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Removes all chunks of the folder, other engines' as well."""
        self._scheduler.clear()
        return True

    # The workers'.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Takes the memory that chunks are read from and written to. Raises ValueError where it is not of this artifact's model."""
        heads, (name, first) = self._heads(get_tensor_model_parallel_rank()), next(iter(kv_caches.items()))
        order = None
        if first.device.type == "cpu":
            layer = self._vllm_config.compilation_config.static_forward_context[name]
            order = cpu_order(layer.isa, first.shape[-2], self._model.head_dim, first.dtype)
        memory = PagedMemory(kv_caches, self._model.layers, len(heads), self._model.head_dim, self._block, order)
        stored = StoredChunks(self._model.slices.codec(heads), self._folder, self._refusals)
        self._worker = WorkerSide(stored, memory, heads, self._chunk)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins what the scheduler planned."""
        planned = self._planned()
        if planned.cleared:  # weights may have changed: what waited has been stored since, or would be
            self._side().drop()
            with suppress(OSError):  # `reset_cache` has said what cannot be removed
                self._folder.clear()
        for name, chunks in planned.loads.items():
            self._side().load(name, chunks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is stored during a forward: a chunk has all layers."""

    def wait_for_save(self) -> None:
        """Copies the chunks that this step's forward filled, and has them stored."""
        for chunk in self._planned().stores:
            self._side().store(chunk)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """The requests whose loads are done."""
        return None, self._side().finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of chunks that were missing or damaged."""
        return self._side().failed()

    def shutdown(self) -> None:
        """Waits until everything is stored. An engine ends its workers first, and then its scheduler."""
        if self._worker is not None:
            self._worker.close()
        if self._role == KVConnectorRole.SCHEDULER:
            with suppress(OSError):  # `reset_cache` has said what cannot be removed
                self._scheduler.close()

    def _heads(self, rank: int) -> range:
        """The KV heads of a rank; ranks share one where there are more of them than heads."""
        return self._model.slices.of_rank(max(1, self._model.kv_heads // self._ranks), self._ranks, rank)

    def _side(self) -> WorkerSide:
        if self._worker is None:
            raise ValueError("no memory is registered, expected vLLM's; call register_kv_caches first")
        return self._worker

    def _planned(self) -> Transfers:
        found = self._get_connector_metadata()
        assert isinstance(found, Transfers)
        return found
