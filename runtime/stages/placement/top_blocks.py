"""The blocks whose representative tokens fit the query best (InfLLM, arXiv:2402.04617)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TopBlocks:
    """Of blocks of `block` tokens, each known by `representatives` of its keys, the `fetched` best of each KV head."""

    block: int = 128
    representatives: int = 4
    fetched: int = 16

    def __post_init__(self) -> None:
        for name, least, remedy in (("block", 1, "128"), ("representatives", 1, "4"), ("fetched", 0, "16")):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}; {remedy} is usual")
        if self.representatives > self.block:
            raise ValueError(
                f"representatives must be at most a block's tokens, got {self.representatives} of {self.block}; 4 is usual"
            )
