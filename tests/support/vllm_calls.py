"""vLLM's calls of a KV connector, in its order: one scheduler and its workers, without a model."""

from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class Request:
    """A request as vLLM's scheduler has it, of its many fields those that connectors read."""

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
    """The calls of one scheduler and its workers, in vLLM's order, for requests that are computed in any pieces.

    Args:
        connectors: the scheduler's, then one a rank.
        compute: computes tokens of a request in a rank's memory: `(rank, request, first, last, blocks)`.
        block: tokens of a block.
        blocks: of the memory.
    """

    def __init__(self, connectors, compute, block, blocks):
        self.scheduler, *self.workers = connectors
        self.compute, self.block, self.free, self.tables = compute, block, list(range(blocks)), {}
        self.seen, self.done = {}, set()  # how many ranks have loaded a request, and those that all have

    def begin(self, request, local=0, shared=()):
        """Schedules a new or preempted request behind `local` tokens that the engine has in blocks `shared`; loads what is stored.

        Returns the tokens that were loaded.
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
        while waiting:  # every rank reports once
            invalid |= self.step({})
            waiting -= self.done
        if bad := [at for at, one in enumerate(table) if one in invalid]:
            request.num_computed_tokens = bad[0] * self.block
        return max(0, request.num_computed_tokens - local)

    def run(self, request, pieces):
        """Computes so many tokens in each of some steps."""
        table = self.tables[request.request_id]
        for tokens in pieces:
            end = request.num_computed_tokens + tokens
            while len(table) * self.block < end:
                table.append(self.free.pop())
            self.step({request.request_id: tokens}, request)
            request.num_computed_tokens = end

    def step(self, scheduled, request=None):
        """One step; returns the blocks that failed to load. `done` are the requests that all ranks have loaded."""
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
        """Frees a request's blocks and forgets it."""
        own = self.tables.pop(request.request_id)
        assert self.scheduler.request_finished(request, own) == (False, None)
        self.free += own

    def close(self):
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()
