"""The scheduler's message to the workers in a step: chunks to load, and chunks to store."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Chunk:
    """The tokens of one file.

    Attributes:
        key: key of the chunk (`keys.py`).
        start: position of its first token.
        blocks: all its blocks of the paged memory, in order.
        held: number of blocks, from the first, that already have their keys and values and are not written.
    """

    key: str
    start: int
    blocks: tuple[int, ...]
    held: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    """The transfers of one step.

    Attributes:
        loads: chunks to load, in order, by request.
        stores: chunks to store, which the step's forward fills.
        cleared: whether all chunks were removed since the last step, so that waiting chunks must not be stored.
    """

    loads: dict[str, list[Chunk]] = field(default_factory=dict)
    stores: list[Chunk] = field(default_factory=list)
    cleared: bool = False
