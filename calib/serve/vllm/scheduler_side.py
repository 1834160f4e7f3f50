"""The connector's part in vLLM's scheduler: finds which chunks of a request are stored, and which its next forward fills.

Loading is asynchronous in vLLM's sense: a request waits until its chunks are in the paged memory, while other requests continue.
Blocks that could not be loaded are reported before the request is scheduled, so that nothing is ever computed from them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from calib.serve.blob_folder import BlobFolder
from calib.serve.vllm.keys import Keys
from calib.serve.vllm.transfers import Chunk, Transfers


@dataclass
class Followed:
    """A request that is not finished.

    Attributes:
        request: vLLM's `Request`.
        keys: keys of its chunks.
        told: number of chunks, from the first, that were handed to workers for storing.
        local: tokens that the engine itself had at its last look-up.
        loading: blocks that are being loaded.
        failed: whether a load of it failed; then it loads no more, since a bad file that cannot be removed would fail again.
    """

    request: Any
    keys: Keys
    told: int = 0
    local: int = 0
    loading: frozenset[int] = frozenset()
    failed: bool = False


class SchedulerSide:
    """Tracks all requests of one engine.

    Args:
        folder: the folder of the stored chunks.
        slices: the KV heads of the ranks, each slice once: a chunk counts as stored if it is stored for all slices.
        model: hash of the model and how it is served (`identity_of`).
        chunk, block: tokens of a chunk, and of a block.
        loads, stores: whether chunks are loaded, and stored.
    """

    def __init__(
        self,
        folder: BlobFolder,
        slices: Collection[range],
        model: str,
        chunk: int,
        block: int,
        loads: bool,
        stores: bool,
    ) -> None:
        self._folder, self._slices, self._model = folder, slices, model
        self._chunk, self._block, self._loads, self._stores = chunk, block, loads, stores
        self._followed: dict[str, Followed] = {}
        self._transfers = Transfers()

    def follow(self, request: Any) -> Followed:
        """Returns the state of a request; the first call begins to track it."""
        name = request.request_id
        if name not in self._followed:
            self._followed[name] = Followed(request, Keys(request, self._model, self._chunk))
        return self._followed[name]

    def forget(self, name: str) -> None:
        """Stops tracking a finished request."""
        self._followed.pop(name, None)

    def clear(self) -> None:
        """Removes all chunks of the folder, including other engines', and lets workers drop chunks that wait to be stored."""
        self._folder.clear()
        self._transfers.cleared = True

    def close(self) -> None:
        """Clears the folder again if no step has passed on `clear`: the workers, which end before, stored their waiting chunks."""
        if self._transfers.cleared:
            self._folder.clear()

    def stored(self, request: Any, local: int) -> int:
        """Returns the number of stored tokens after the engine's own `local` ones. At least the last token is left to compute."""
        own = self.follow(request)
        own.local = local
        if not self._loads or own.failed:
            return 0
        at, last = local // self._chunk, min(own.keys.whole, (request.num_tokens - 1) // self._chunk)
        while at < last and all(self._folder.has(file_key(own.keys[at], heads)) for heads in self._slices):
            at += 1
        return max(0, at * self._chunk - local)

    def load(self, request: Any, blocks: list[int], tokens: int) -> None:
        """Plans to load `tokens` tokens after the engine's own into the request's `blocks`.

        Raises ValueError if they do not end at a chunk's end, as the number returned by `stored` does.
        """
        if not tokens:
            return
        own, chunks = self.follow(request), list[Chunk]()
        end = own.local + tokens
        if end % self._chunk:
            raise ValueError(
                f"the engine loads {tokens} stored tokens after {own.local} of its own, expected a sum that is a multiple of "
                f"{self._chunk}; serve it with another connector"
            )
        for index in range(own.local // self._chunk, end // self._chunk):
            held = max(0, own.local - index * self._chunk) // self._block
            chunks.append(self._chunk_of(own, index, blocks, held))
        self._transfers.loads[request.request_id] = chunks
        own.loading = frozenset(block for chunk in chunks for block in chunk.blocks[chunk.held :])

    def step(self, scheduled: Mapping[str, int], blocks_of: Any) -> Transfers:
        """Returns the workers' transfers for this step.

        `scheduled` is the number of tokens that the step computes for each request; `blocks_of` returns a request's blocks.
        """
        found, self._transfers = self._transfers, Transfers()
        for name, tokens in scheduled.items() if self._stores else ():
            own = self._followed.get(name)
            if own is None:
                continue
            # Tokens that are not known yet (drafts, and those sampled by a step in flight) come after the known ones.
            filled = min((own.request.num_computed_tokens + tokens) // self._chunk, own.keys.whole)
            if filled > own.told:
                blocks = blocks_of(name)
                found.stores += [self._chunk_of(own, index, blocks) for index in range(own.told, filled)]
                own.told = filled
        return found

    def failed(self, blocks: Collection[int]) -> None:
        """Records that workers could not load these blocks; their tokens are computed, and stored again if the file is gone."""
        for own in self._followed.values():
            if not own.loading.isdisjoint(blocks):
                own.failed, own.told = True, 0

    def loaded(self, names: Collection[str]) -> None:
        """Records that all workers have finished the loads of these requests."""
        for name in names:
            if name in self._followed:
                self._followed[name].loading = frozenset()

    def _chunk_of(self, own: Followed, index: int, blocks: list[int], held: int = 0) -> Chunk:
        each = self._chunk // self._block
        return Chunk(own.keys[index], index * self._chunk, tuple(blocks[index * each : (index + 1) * each]), held)


def file_key(key: str, heads: range) -> str:
    """Returns a chunk's key in the folder for the KV heads of one rank."""
    return f"{key} {heads.start} {heads.stop}"
