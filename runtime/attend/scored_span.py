"""A span of tokens with their scores: the input of one step of the running softmax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.kernels.attend.operation import Attended, ExactTokens


@dataclass(slots=True)
class ScoredSpan:
    """A span of tokens: its masked logits, and a function that mixes its values by weights, or a kernel's result for both.

    Attributes:
        scores: float32 `[rows, kv_heads, query rows, tokens]`, -inf where hidden. Undefined for a kernel's result, unless its
            probabilities are needed.
        mix: maps weights `[rows, kv_heads, query rows, tokens]` to parts `[rows, kv_heads, query rows, D]` of the mixture of
            values, which are added in this order; or a kernel's mixture; None where the output already has it.
        watched: whether saliency needs the final probabilities.
        left: what corrections add to the output, from the final probabilities of all spans with the same function, concatenated.
        positions: integers `[rows, kv_heads or 1, tokens]` or a slice, where the tokens' mass is wanted.
        is_last: whether no span follows, and every query row sees a token of this one.
    """

    scores: Tensor
    mix: Callable[[Tensor], Sequence[Tensor]] | Attended | None
    watched: bool = False
    left: Callable[[Tensor], Tensor] | None = None
    positions: Tensor | slice | None = None
    is_last: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether its final probabilities are needed."""
        return self.watched or self.left is not None or self.positions is not None


@dataclass(slots=True)
class ExactSpan:
    """The exact tokens, attended by a kernel that also merges all spans before; it is the last span.

    Attributes:
        tokens: keys and values of the window and of the new tokens.
        watched: as in `ScoredSpan`.
        positions: where the tokens' mass is wanted: integers `[rows, kv_heads or 1, tokens]`, one tensor for each of several
            consecutive parts of `tokens`.
    """

    tokens: ExactTokens
    watched: bool = False
    positions: tuple[Tensor, ...] = ()

    @property
    def is_asked(self) -> bool:
        """Whether its final probabilities are needed."""
        return self.watched or bool(self.positions)

    def scored(self, scores: Tensor) -> list[ScoredSpan]:
        """The scores that the kernel returned, as spans, one for each part."""
        if not self.positions:
            return [ScoredSpan(scores, None, self.watched)]
        parts = scores.split([positions.shape[-1] for positions in self.positions], -1)
        return [
            ScoredSpan(part, None, self.watched, positions=positions)
            for part, positions in zip(parts, self.positions, strict=True)
        ]


def joined(spans: Sequence[ScoredSpan], order: Sequence[int]) -> ScoredSpan:
    """Joins spans for one step of the softmax: their mixtures are added in the order of `spans`, their scores concatenated in
    `order`.

    Not for spans attended by a kernel or with corrections.
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
    """The positions of a span's tokens: int64 `[rows, kv_heads, tokens]`."""
    at, (rows, heads) = span.positions, span.scores.shape[:2]
    assert at is not None
    if isinstance(at, slice):
        at = torch.arange(at.start, at.stop, device=span.scores.device).expand(rows, 1, -1)
    return at.expand(-1, heads, -1)
