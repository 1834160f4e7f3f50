"""Probes: the sample of query rows from whose attention saliency is computed (ZipCache, arXiv:2405.14256, section 4.3)."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.runtime.messages.printable import printable
from calib.runtime.stages.seeded_rng import WHOLE, SeededRng

STRATEGIES = ("random+recent", "random", "recent", "all", "special")


def share_of(share: float, count: int) -> int:
    """Returns `share` x `count` rounded down, at least 1 for a positive share, at most `count`."""
    return min(count, max(1, math.floor(share * count + 1e-9))) if share > 0 else 0


@dataclass(frozen=True)
class Probes:
    """Probe rows of a prompt and of a block of decoded tokens.

    In a prompt probes are the newest rows, rows drawn without replacement, half of each (random+recent), all rows, or the tokens
    whose id is in `special_ids` (`with_ids` sets those of a tokenizer). In a block the same shares hold, with a draw for each
    row (Algorithm 3: index > 95 or 5 % of 100). A block's last row always is a probe, because otherwise its last token would have
    no score. For blocks `special` is the same as random+recent.
    """

    strategy: str = "random+recent"
    share: float = 0.1
    special_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"probes must be one of {', '.join(STRATEGIES)}, got {printable(self.strategy)}")
        if type(self.share) not in (float, int) or not 0 < self.share <= 1:
            raise ValueError(f"probe_share must be a number in (0, 1], got {printable(self.share)}")
        ids = self.special_ids
        if not isinstance(ids, tuple | list) or any(type(one) is not int or one < 0 for one in ids):
            raise ValueError(f"special_ids must be a list of token ids, whole numbers from 0, got {printable(ids)}")
        if ids and self.strategy != "special":
            raise ValueError(
                f"probes={printable(self.strategy)} with special_ids={printable(list(ids))}: "
                "give the ids with probes='special', and only there"
            )

    @property
    def lacks_ids(self) -> bool:
        """Whether probes are special tokens, and their ids are not set yet."""
        return self.strategy == "special" and not self.special_ids

    def with_ids(self, special_ids: tuple[int, ...]) -> "Probes":
        """Returns the probes with these ids of special tokens, if they lack ids; else unchanged."""
        return replace(self, special_ids=special_ids) if self.lacks_ids else self

    def of_prompt(self, length: int, rng: SeededRng, ids: Tensor | None) -> Tensor:
        """Positions of the probes among the `length` rows of a prompt with token ids `ids [length]`: int64, rising, on the host."""
        positions = torch.arange(length)
        if self.strategy == "all":
            return positions
        if self.strategy == "special":
            assert ids is not None and not self.lacks_ids, "special probes without token ids"
            return positions[torch.isin(ids.cpu(), torch.tensor(self.special_ids))]
        halved = self.share / 2 if self.strategy == "random+recent" else self.share
        recent = 0 if self.strategy == "random" else share_of(halved, length)
        drawn = 0 if self.strategy == "recent" else share_of(halved, length)
        rest = length - recent
        chosen = rng.at(positions[:rest]).argsort(stable=True)[:drawn]
        return torch.cat([chosen.sort().values, positions[rest:]])

    def of_block(self, start: int, size: int, rng: SeededRng) -> tuple[bool, ...]:
        """Whether each of the `size` rows from position `start` on is a probe; for decode steps, so computed on the host."""
        if self.strategy == "all":
            return (True,) * size
        halved = self.share if self.strategy in ("random", "recent") else self.share / 2
        recent = 1 if self.strategy == "random" else share_of(halved, size)
        chance = 0 if self.strategy == "recent" else halved * WHOLE
        return tuple(index >= size - recent or rng.at(start + index) < chance for index in range(size))
