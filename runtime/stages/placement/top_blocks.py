"""The blocks whose representative keys have the largest products with the query (InfLLM, arXiv:2402.04617)."""

from dataclasses import dataclass

from calib.runtime.messages.whole_numbers import check_whole


@dataclass(frozen=True)
class TopBlocks:
    """For each KV head the `fetched` best blocks of `block` tokens, each represented by `representatives` of its keys.

    They are chosen anew for every `chunk` tokens of a forward; None: once for all its tokens.
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
