"""The connector's part in one of vLLM's workers: stores chunks of the paged memory in files, and loads them.

One thread reads and decodes files, another encodes and writes them, both on the host; the engine's own thread only copies. A chunk
that cannot be loaded ends its request's load: its blocks and the later ones are reported, and nothing was written to them.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from torch import Tensor

from calib.serve.stored_chunks import StoredChunks
from calib.serve.vllm.paged_memory import PagedMemory
from calib.serve.vllm.scheduler_side import file_key
from calib.serve.vllm.transfers import Chunk

MOST_WAITING = 8  # most chunks that wait to be stored; with more, the engine waits


Load: TypeAlias = "deque[tuple[Chunk, Future[Tensor | None]]]"  # the chunks of one request, in order


class WorkerSide:
    """Transfers the chunks of one rank.

    Args:
        stored: the rank's chunks in the folder.
        memory: the rank's paged memory.
        heads: its KV heads.
        chunk: tokens of a chunk.
    """

    def __init__(self, stored: StoredChunks, memory: PagedMemory, heads: range, chunk: int) -> None:
        self._stored, self._memory, self._heads, self._chunk = stored, memory, heads, chunk
        self._reader = ThreadPoolExecutor(1, "calib-load")
        self._writer = ThreadPoolExecutor(1, "calib-store")
        self._loads: dict[str, Load] = {}
        self._stores: deque[Future[bool]] = deque()
        self._failed = set[int]()

    def load(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Begins to load a request's chunks."""
        self._loads[name] = deque((chunk, self._reader.submit(self._read, chunk)) for chunk in chunks)

    def finished(self) -> set[str]:
        """Writes the chunks decoded since the last call into the paged memory, and returns the requests whose loads are
        finished."""
        found = set[str]()
        for name, load in self._loads.items():
            while load and load[0][1].done():
                chunk, read = load.popleft()
                rows = read.result()
                if rows is None:
                    self._give_up(load, chunk)
                else:
                    self._write(chunk, rows)
            if not load:
                found.add(name)
        for name in found:
            del self._loads[name]
        return found

    def failed(self) -> set[int]:
        """Returns the blocks that could not be loaded since the last call."""
        found, self._failed = self._failed, set()
        return found

    def store(self, chunk: Chunk) -> None:
        """Copies a chunk and queues it for storing, unless it is stored already."""
        if self._stored.has(file_key(chunk.key, self._heads)):
            return
        while self._stores and (self._stores[0].done() or len(self._stores) >= MOST_WAITING):
            self._stores.popleft().result()
        rows = self._memory.read(chunk.blocks)
        self._stores.append(
            self._writer.submit(self._stored.store, file_key(chunk.key, self._heads), rows, chunk.start)
        )

    def drop(self) -> None:
        """Drops the chunks that wait to be stored, and waits for the one that is being stored."""
        while self._stores:
            store = self._stores.popleft()
            if not store.cancel():
                store.result()

    def close(self) -> None:
        """Waits until everything is stored."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _read(self, chunk: Chunk) -> Tensor | None:
        return self._stored.load(file_key(chunk.key, self._heads), self._chunk, self._memory.dtype, chunk.start)

    def _write(self, chunk: Chunk, rows: Tensor) -> None:
        block = rows.shape[2] // len(chunk.blocks)
        self._memory.write(chunk.blocks[chunk.held :], rows[:, :, chunk.held * block :])

    def _give_up(self, load: Load, chunk: Chunk) -> None:
        self._failed.update(chunk.blocks[chunk.held :])
        while load:
            behind, read = load.popleft()
            read.cancel()
            self._failed.update(behind.blocks[behind.held :])
