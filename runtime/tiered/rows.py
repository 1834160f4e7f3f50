"""Rows whose tokens lie in tiers: a table of pages for each, filled alike by every layer and KV head."""

from calib.runtime.pages import TIER_PAGE_TOKENS
from calib.runtime.rows import Forward, Rows
from calib.runtime.stages.contract import Tiering


class TieredRows(Rows):
    """Lengths, prompts and pages. Which tokens a slot holds differs by layer and head; how many slots are in use does not."""

    def __init__(self, tiering: Tiering, tiers: int, layers: int, sliding: int | None = None) -> None:
        """`tiers` are stored; where the tiering names one more, its tokens are evicted."""
        self.tiering, self.stored = tiering, tiers
        super().__init__(layers, sliding, tiers, TIER_PAGE_TOKENS)

    def clear(self) -> None:
        """Also the prompts' lengths."""
        super().clear()
        self.prompts: list[int] = []

    def held(self, row: int, length: int) -> list[int]:
        """Slots in use of each stored tier when `row` holds `length` tokens."""
        return self.tiering.held(length, self.prompt(row))[: self.stored]

    def exact(self, row: int, length: int) -> int:
        """Slots in use of the exact window then."""
        return self.tiering.exact(length, self.prompt(row))

    def prompt(self, row: int) -> int:
        """Tokens of the row's first forward; 0 before it is stored."""
        return self.prompts[row] if self.prompts else 0

    def alike(self, forward: Forward) -> list[list[int]]:
        """`forward.alike`, where rows of other prompts are not alike."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, rows in enumerate(forward.alike):
            for row in rows:
                groups.setdefault((number, self.prompt(row)), []).append(row)
        return list(groups.values())

    def reserve(self, forward: Forward) -> None:
        """Pages for what each tier gains; the pages of a tier whose slots are used again become the row's own."""
        if not self.prompts:
            self.prompts = [0] * len(forward.before)
        for row, (before, count) in enumerate(zip(forward.before, forward.counts, strict=True)):
            if count and not before:
                self.prompts[row] = count
        held = [
            list(zip(self.held(row, before), self.held(row, after), strict=True))
            for row, (before, after) in enumerate(zip(forward.before, forward.after, strict=True))
        ]
        forward.copies = []
        for tier, table in enumerate(self.tables):
            spans = [of_row[tier] for of_row in held]
            pages = [-(-after // TIER_PAGE_TOKENS) for _, after in spans]
            table.prepare(sum(max(0, n - len(own)) for n, own in zip(pages, table.rows, strict=True)))
            copies = []
            for row, ((before, after), count) in enumerate(zip(spans, pages, strict=True)):
                first = 0 if self.tiering.rewritten(tier) else before // TIER_PAGE_TOKENS
                changes = after > before or (forward.counts[row] and self.tiering.rewritten(tier))
                copies += table.reserve(row, count, range(first, count) if changes else ())
            forward.copies.append(copies)

    def permute(self, sources: list[int]) -> list[list[int] | None]:
        """Also the prompts."""
        kept = super().permute(sources)
        self.prompts = [self.prompts[source] for source in sources] if self.prompts else []
        return kept
