"""Calls a KV connector as vLLM does, in the same order: one scheduler and its workers, without a model."""

from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class Request:
    """A request with those fields of vLLM's scheduler requests that connectors read."""

    request_id: str
    all_token_ids: list
    num_computed_tokens: int = 0
    mm_features: list = field(default_factory=list)
    lora_request: object = None
    cache_salt: str | None = None
    prompt_embeds: object = None

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Engine:
    """Calls of one scheduler and its workers, in vLLM's order; requests may be computed in chunks of any sizes.

    Args:
        connectors: the scheduler's connector, then one for each rank.
        compute: writes keys and values of a request's tokens to a rank's memory: `(rank, request, first, last, blocks)`.
        block: tokens of a block.
        blocks: number of blocks of each rank's memory.
    """

    def __init__(self, connectors, compute, block, blocks):
        self.scheduler, *self.workers = connectors
        self.compute, self.block, self.free, self.tables = compute, block, list(range(blocks)), {}
        self.seen, self.done = {}, set()  # ranks that have loaded each request; requests that all have loaded

    def begin(self, request, local=0, shared=()):
        """Schedule a new or preempted request, of which `local` tokens are already in the blocks `shared`, and load stored tokens.

        Returns the number of tokens that were loaded.
        """
        self.scheduler.on_new_request(request)
        tokens, waits = self.scheduler.get_num_new_matched_tokens(request, local)
        assert waits == (tokens > 0) and tokens % self.block == 0 and local + tokens < request.num_tokens
        table = [*shared, *(self.free.pop() for _ in range(-(-(local + tokens) // self.block) - len(shared)))]
        self.tables[request.request_id] = table
        own = SimpleNamespace(get_block_ids=lambda: (table,))
        self.scheduler.update_state_after_alloc(request, own, tokens)
        request.num_computed_tokens = local + tokens
        if not tokens:
            return 0
        invalid, waiting = set(), {request.request_id}
        while waiting:  # until every rank has reported
            invalid |= self.step({})
            waiting -= self.done
        if bad := [at for at, one in enumerate(table) if one in invalid]:
            request.num_computed_tokens = bad[0] * self.block
        return max(0, request.num_computed_tokens - local)

    def run(self, request, pieces):
        """Run one step for each entry of `pieces`, which is the number of tokens that it computes."""
        table = self.tables[request.request_id]
        for tokens in pieces:
            end = request.num_computed_tokens + tokens
            while len(table) * self.block < end:
                table.append(self.free.pop())
            self.step({request.request_id: tokens}, request)
            request.num_computed_tokens = end

    def step(self, scheduled, request=None):
        """Run one step and return the blocks that failed to load; sets `done` to the requests that all ranks have now loaded."""
        state = SimpleNamespace(get_block_ids=lambda name: (self.tables[name],))
        planned = self.scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        )
        invalid = set()
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(planned)
            worker.start_load_kv(None)
            for name, tokens in scheduled.items():
                first = request.num_computed_tokens
                self.compute(rank, request, first, first + tokens, self.tables[name])
            worker.wait_for_save()
            for name in worker.get_finished(set())[1]:
                self.seen[name] = self.seen.get(name, 0) + 1
            invalid |= worker.get_block_ids_with_load_errors()
            worker.clear_connector_metadata()
        self.done = {name for name, count in self.seen.items() if count == len(self.workers)}
        for name in self.done:
            del self.seen[name]
        self.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=invalid, finished_recving=self.done))
        return invalid

    def finish(self, request):
        """Finish a request and free its blocks."""
        own = self.tables.pop(request.request_id)
        assert self.scheduler.request_finished(request, own) == (False, None)
        self.free += own

    def close(self):
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()
