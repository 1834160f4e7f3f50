"""The blocks whose representative tokens fit the query best (InfLLM, arXiv:2402.04617)."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole


@dataclass(frozen=True)
class TopBlocks:
    """Of blocks of `block` tokens, each known by `representatives` of its keys, the `fetched` best of each KV head.

    They are chosen anew for every `chunk` tokens of a forward; None: once for all of them.
    """

    block: int = 128
    representatives: int = 4
    fetched: int = 16
    chunk: int | None = None

    speculates = False

    def __post_init__(self) -> None:
        for name, least, remedy in (("block", 1, "128"), ("representatives", 1, "4"), ("fetched", 0, "16")):
            value = getattr(self, name)
            check_whole(name, value, least, f"a whole number, at least {least}", f"; {remedy} is usual")
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1, "a whole number of tokens, at least 1", "; 512 is usual")
        if self.representatives > self.block:
            raise ValueError(
                f"representatives must be at most a block's tokens, got {self.representatives} of {self.block}; 4 is usual"
            )

    @property
    def entries(self) -> int:
        """The most tokens of a KV head that are fetched at once."""
        return self.fetched * self.block
