"""What attention has shown about the tokens of the current forward, kept until the forward is stored."""

import torch
from torch import Tensor

from calib.runtime.attend.attention_stats import AttentionStats
from calib.runtime.device.extremes import Extremes
from calib.runtime.device.row_index import row_index


class ForwardStats:
    """Keyed by the rows attended together: `seen`, the mass of held and new tokens, and the `queries` themselves."""

    def __init__(self) -> None:
        self.seen: dict[range, AttentionStats] = {}
        self.queries: dict[range, Tensor] = {}
        self.probes: dict[int, Tensor] = {}  # by row: the positions of its prompt's observed queries, int64 on the host
        self.policies: dict[int, Tensor] = {}  # by row that begins: the policy that each KV head has chosen
        # Extremes of keys and values, where a layer needs those of its first forward.
        self.extremes: dict[str, Extremes] = {}

    def clear(self) -> None:
        """Drops everything, after the forward is stored."""
        self.seen.clear()
        self.queries.clear()
        self.probes.clear()
        self.policies.clear()
        self.extremes.clear()

    def of(self, rows: list[int], count: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mass of held slots `[len(rows), heads, slots]` and of the `count` new tokens, for `rows` of equal length; 0 if not
        observed."""
        for span, seen in self.seen.items():
            if len(span) == seen.new.shape[0] == len(rows) and rows[0] == span.start and rows[-1] == span.stop - 1:
                return seen.held, seen.new
        slots = max((seen.held.shape[2] for seen in self.seen.values()), default=0)
        held, new = (torch.zeros(len(rows), heads, size, dtype=torch.float32, device=device) for size in (slots, count))
        for span, seen in self.seen.items():
            inside = [(i, row - span.start) for i, row in enumerate(rows) if row in span]
            if inside:
                to, of = map(list, zip(*inside, strict=True))
                into, from_rows = row_index(to, device), row_index(of, device)
                held[into, :, : seen.held.shape[2]] = seen.held[from_rows]
                new[into] = seen.new[from_rows]
        return held, new

    def queries_of(self, rows: list[int]) -> Tensor | None:
        """The queries of `rows`, without padding; None where none were kept, because no measured transform needs them."""
        parts = []
        for span, query in self.queries.items():
            inside = [row - span.start for row in rows if row in span]
            if inside:
                parts.append(query if len(inside) == query.shape[0] else query[row_index(inside, query.device)])
        if len(parts) == 1:  # no copy of a prompt's queries
            return parts[0]
        return torch.cat(parts) if parts else None
