"""A span of tokens that queries have been scored against: what one step of the running softmax takes in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import Attended, ExactTokens


@dataclass(slots=True)
class ScoredSpan:
    """A span of tokens: its logits, masked, and how weights mix its values; or what a kernel made of both.

    Attributes:
        scores: float32 `[rows, kv_heads, query rows, tokens]`, -inf where hidden; of what a kernel attended anything, unless
            something is asked of its probabilities.
        mix: the values weighted by `[rows, kv_heads, query rows, tokens]`, in parts `[rows, kv_heads, query rows, D]` that are
            added up in this order; or the mixture itself; None: the output has it.
        watched: whether saliency asks for the probabilities.
        left: what the final probabilities of all spans that name it, side by side, add to the output.
        positions: whole numbers `[rows, kv_heads or 1, tokens]` or a slice, where the tokens' mass is asked for.
        is_last: no other follows, and every query row meets a token of it.
    """

    scores: Tensor
    mix: Callable[[Tensor], Sequence[Tensor]] | Attended | None
    watched: bool = False
    left: Callable[[Tensor], Tensor] | None = None
    positions: Tensor | slice | None = None
    is_last: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether its final probabilities are asked for."""
        return self.watched or self.left is not None or self.positions is not None


@dataclass(slots=True)
class ExactSpan:
    """Exact tokens that a kernel meets, which joins all other spans with them: the last one.

    Attributes:
        tokens: where they lie.
        watched: as of a `ScoredSpan`.
        positions: where the tokens' mass is asked for, whole numbers `[rows, kv_heads or 1, tokens]` of parts that lie side by
            side.
    """

    tokens: ExactTokens
    watched: bool = False
    positions: tuple[Tensor, ...] = ()

    @property
    def is_asked(self) -> bool:
        """Whether its final probabilities are asked for."""
        return self.watched or bool(self.positions)

    def scored(self, scores: Tensor) -> list[ScoredSpan]:
        """What a kernel told of them, as spans: a part each."""
        if not self.positions:
            return [ScoredSpan(scores, None, self.watched)]
        parts = scores.split([positions.shape[-1] for positions in self.positions], -1)
        return [
            ScoredSpan(part, None, self.watched, positions=positions)
            for part, positions in zip(parts, self.positions, strict=True)
        ]


def joined(spans: Sequence[ScoredSpan], order: Sequence[int]) -> ScoredSpan:
    """Spans that are taken in by one step: their mixtures are added up as they come, their scores lie side by side in `order`.

    No kernel has attended them, and no tier corrects them.
    """
    widths = [spans[i].scores.shape[-1] for i in order]

    def mix(weights: Tensor) -> list[Tensor]:
        own: dict[int, Tensor] = dict(zip(order, weights.split(widths, -1), strict=True))
        mixed: list[Tensor] = []
        for i, span in enumerate(spans):
            assert callable(span.mix)
            mixed += span.mix(own[i])
        return mixed

    positions = None
    if any(span.positions is not None for span in spans):
        positions = torch.cat([_numbers(spans[i]) for i in order], -1)
    return ScoredSpan(torch.cat([spans[i].scores for i in order], -1), mix, positions=positions)


def _numbers(span: ScoredSpan) -> Tensor:
    """int64 `[rows, kv_heads, tokens]`: the positions of a span's tokens."""
    at, (rows, heads) = span.positions, span.scores.shape[:2]
    assert at is not None
    if isinstance(at, slice):
        at = torch.arange(at.start, at.stop, device=span.scores.device).expand(rows, 1, -1)
    return at.expand(-1, heads, -1)
