"""What the scheduler tells the workers in a step: chunks to load, and chunks to store."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Chunk:
    """Tokens of one file.

    Attributes:
        key: of the tokens (`keys.py`).
        start: position of the first.
        blocks: of the paged memory, in order; all blocks of the chunk.
        held: how many of them, from the first on, hold their keys and values already: they are left as they are.
    """

    key: str
    start: int
    blocks: tuple[int, ...]
    held: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    """Of one step: `loads` by request, each from its first chunk on, and `stores`, which the step's forward fills. `cleared`: all
    chunks were removed since the step before, so that none that waits to be stored may be."""

    loads: dict[str, list[Chunk]] = field(default_factory=dict)
    stores: list[Chunk] = field(default_factory=list)
    cleared: bool = False
