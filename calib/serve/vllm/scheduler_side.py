"""The connector in vLLM's scheduler: which chunks of a request are stored, and which its next forward fills.

Loading is asynchronous in vLLM's sense: a request waits until its chunks lie in the paged memory, other requests go on. What could
not be loaded is reported before the request is scheduled, so that nothing is ever computed from it.
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
        request: vLLM's.
        keys: of its chunks.
        told: chunks, from the first on, that workers were told to store.
        local: tokens that the engine had itself when it asked last.
        loading: blocks that are being loaded.
        failed: whether a load of it failed; it loads no more then, as what cannot be removed would fail for ever.
    """

    request: Any
    keys: Keys
    told: int = 0
    local: int = 0
    loading: frozenset[int] = frozenset()
    failed: bool = False


class SchedulerSide:
    """All requests of one engine.

    Args:
        folder: of the stored chunks.
        slices: the KV heads of the ranks, each slice once: a chunk is stored where all slices have it.
        model: what identifies the model and how it is served (`keys.py`).
        chunk, block: tokens of a chunk, and of a block.
        loads, stores: whether it does.
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
        """What is known of a request, from its first sight on."""
        name = request.request_id
        if name not in self._followed:
            self._followed[name] = Followed(request, Keys(request, self._model, self._chunk))
        return self._followed[name]

    def forget(self, name: str) -> None:
        """A request is finished."""
        self._followed.pop(name, None)

    def clear(self) -> None:
        """Removes all chunks of the folder, other engines' as well, and has workers drop what they have not stored yet."""
        self._folder.clear()
        self._transfers.cleared = True

    def close(self) -> None:
        """After the workers, which store what waits: where no step has told them of `clear`, that goes as well."""
        if self._transfers.cleared:
            self._folder.clear()

    def stored(self, request: Any, local: int) -> int:
        """Tokens that are stored behind the first `local` ones, which the engine has. The last token is always left to compute."""
        own = self.follow(request)
        own.local = local
        if not self._loads or own.failed:
            return 0
        at, last = local // self._chunk, min(own.keys.whole, (request.num_tokens - 1) // self._chunk)
        while at < last and all(self._folder.has(file_key(own.keys[at], heads)) for heads in self._slices):
            at += 1
        return max(0, at * self._chunk - local)

    def load(self, request: Any, blocks: list[int], tokens: int) -> None:
        """The engine has taken `blocks` for the request, and expects so many tokens behind its own to be loaded.

        Raises ValueError where these are not what `stored` said.
        """
        if not tokens:
            return
        own, chunks = self.follow(request), list[Chunk]()
        end = own.local + tokens
        if end % self._chunk:
            raise ValueError(
                f"the engine takes {tokens} stored tokens behind {own.local}, expected up to a multiple of {self._chunk}, as it "
                "was told; serve it with another connector"
            )
        for index in range(own.local // self._chunk, end // self._chunk):
            held = max(0, own.local - index * self._chunk) // self._block
            chunks.append(self._chunk_of(own, index, blocks, held))
        self._transfers.loads[request.request_id] = chunks
        own.loading = frozenset(block for chunk in chunks for block in chunk.blocks[chunk.held :])

    def step(self, scheduled: Mapping[str, int], blocks_of: Any) -> Transfers:
        """What workers do in this step, which computes so many tokens of each request; `blocks_of` gives a request's blocks."""
        found, self._transfers = self._transfers, Transfers()
        for name, tokens in scheduled.items() if self._stores else ():
            own = self._followed.get(name)
            if own is None:
                continue
            # Tokens that are not known yet (drafts, and those that a step in flight samples) lie behind the known ones.
            filled = min((own.request.num_computed_tokens + tokens) // self._chunk, own.keys.whole)
            if filled > own.told:
                blocks = blocks_of(name)
                found.stores += [self._chunk_of(own, index, blocks) for index in range(own.told, filled)]
                own.told = filled
        return found

    def failed(self, blocks: Collection[int]) -> None:
        """Workers could not load these blocks: what is computed instead is stored again, where its file is gone."""
        for own in self._followed.values():
            if not own.loading.isdisjoint(blocks):
                own.failed, own.told = True, 0

    def loaded(self, names: Collection[str]) -> None:
        """All workers are done with what these requests load."""
        for name in names:
            if name in self._followed:
                self._followed[name].loading = frozenset()

    def _chunk_of(self, own: Followed, index: int, blocks: list[int], held: int = 0) -> Chunk:
        each = self._chunk // self._block
        return Chunk(own.keys[index], index * self._chunk, tuple(blocks[index * each : (index + 1) * each]), held)


def file_key(key: str, heads: range) -> str:
    """Of a chunk, for the KV heads of one rank."""
    return f"{key} {heads.start} {heads.stop}"
