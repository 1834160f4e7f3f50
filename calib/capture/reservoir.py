"""A uniform sample of tokens in bounded memory that does not depend on batches, their order or the number of processes.

Each token gets a priority, a hash of (seed, its number in the corpus); the sample is the tokens with the lowest priorities.
Two samples of disjoint parts of a corpus merge into exactly the sample of the whole.
"""

import torch
from torch import Tensor, distributed, nn

LAST = torch.iinfo(torch.int64).max


def priorities(seed: int, index: Tensor) -> Tensor:
    """Returns a uniform hash of (seed, index) for each entry of `index` (int64, any shape): int64 in [0, 2^62).

    SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) in arithmetic modulo 2^64. Two bits are dropped so that
    empty slots, whose priority is the largest int64, sort after every token.
    """
    z = index * -7046029254386353131 + ((seed + 1) * 0x2545F4914F6CDD1D) % 2**63  # 0x9E3779B97F4A7C15
    z = (z ^ shifted(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ shifted(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return shifted(z ^ shifted(z, 31), 2)


def shifted(z: Tensor, bits: int) -> Tensor:
    """Returns the logical right shift of int64 (torch's shift is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class Reservoir(nn.Module):
    """The `capacity` tokens with the lowest priorities, each with a row of `width` numbers.

    Args:
        capacity: tokens kept.
        width: numbers kept of each token.
        seed: another seed gives another sample.
        dtype: of the rows; a 16-bit model's numbers lose nothing in its own dtype.

    Buffers: `priority` int64 `[capacity]`, ascending, the largest int64 for empty slots; `rows` `[capacity, width]`.
    """

    def __init__(self, capacity: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if capacity < 1 or width < 1:
            raise ValueError(f"capacity={capacity}, width={width}: both must be at least 1")
        self.seed = seed
        self.register_buffer("priority", torch.full((capacity,), LAST))
        self.register_buffer("rows", torch.zeros(capacity, width, dtype=dtype))

    def add(self, index: Tensor, rows: Tensor) -> None:
        """Adds tokens to the candidates: `index` int64 `[tokens]`, their numbers in the corpus; `rows` `[tokens, width]`."""
        priority = priorities(self.seed, index)
        # Once the sample is full few tokens enter, so only those are sorted and copied.
        enters = priority < self.priority[-1].to(priority.device)
        self.merge_rows(priority[enters], rows[enters].to(self.rows.dtype))

    def merge(self, other: "Reservoir") -> None:
        """Merges another sample, of other tokens; raises ValueError for another seed, capacity or width."""
        if self.seed != other.seed or self.rows.shape != other.rows.shape:
            raise ValueError("reservoirs merge only with the same seed, capacity and width")
        self.merge_rows(other.priority, other.rows)

    def merge_rows(self, priority: Tensor, rows: Tensor) -> None:
        """Merges candidates given by `priority [n]` and `rows [n, width]`."""
        if not len(priority):
            return
        priority = torch.cat([self.priority, priority.to(self.priority.device)])
        kept = priority.argsort(stable=True)[: len(self.priority)]
        self.rows = torch.cat([self.rows, rows.to(self.rows.device)])[kept]
        self.priority = priority[kept]

    def synchronise(self, device: torch.device) -> None:
        """Merges the samples of all processes, so that each holds the merged one; tensors are exchanged on `device`."""
        gathered = {}
        for name in ("priority", "rows"):
            part = getattr(self, name).to(device).contiguous()
            gathered[name] = [torch.empty_like(part) for _ in range(distributed.get_world_size())]
            distributed.all_gather(gathered[name], part)
        # Every process merges all samples, with its own, into an empty reservoir in the same order.
        self.clear()
        for priority, rows in zip(gathered["priority"], gathered["rows"], strict=True):
            self.merge_rows(priority, rows)

    def clear(self) -> None:
        """Empties the sample."""
        self.priority = torch.full_like(self.priority, LAST)

    def sample(self) -> Tensor:
        """Returns the rows of the tokens, `[at most capacity, width]`, in order of priority."""
        return self.rows[self.priority < LAST]
