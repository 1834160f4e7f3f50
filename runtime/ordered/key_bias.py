"""The positions of an ordered stream's tokens as their folded bias needs them (`stages/transform/without_bias.py`): a token's
position is its number in its row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward
from calib.runtime.rotation import Rotation
from calib.runtime.stages.transform import WithoutBias


@dataclass(frozen=True)
class BiasAtPositions:
    """R_t b of a layer's keys: taken off tokens before they are encoded, and given back to scores.

    A caller whose positions differ from the tokens' numbers has another R_t taken off than the model put in; the same comes back,
    so attention stays right.
    """

    stage: WithoutBias
    rotation: Rotation

    def off(self, forward: Forward, tokens: Tensor, start: int | None = None) -> Tensor:
        """Keys `[rows, kv_heads, n, D]` without it, float32: of the tokens from `start` on, the same in all rows, or with None of
        the next token of each row of the batch."""
        if start is None:
            before = forward.tensor("positions of new keys", lambda step: step.before, tokens.device)
            cos, sin = (part[:, None, None] for part in self._at(before))
        else:
            cos, sin = self._between(forward, start, start + tokens.shape[2], tokens.device)
        return tokens.float() - self.stage.at(cos, sin)

    def whole(self, tokens: Tensor) -> Tensor:
        """The keys of a row's first tokens, `[kv_heads, n, D]`, from those without it."""
        cos, sin = self._at(torch.arange(tokens.shape[1], device=tokens.device))
        return tokens + self.stage.at(cos[None], sin[None])

    def scores(self, forward: Forward, query: Tensor, positions: slice | Tensor) -> Tensor:
        """q.R_t b, `[rows, kv_heads, query rows, n]`, of `query [rows, kv_heads, query rows, D]` and the tokens at `positions`: a
        stretch, or int64 `[rows, n]`."""
        found, constant = self.stage.of_query(query, len(self.rotation.frequencies))
        if isinstance(positions, slice):
            table = self._table(forward, positions, query.device)
        else:
            table = torch.cat(self._at(positions), -1).mT[:, None]
        scores = found @ table
        return scores if constant is None else scores + constant

    def _table(self, forward: Forward, positions: slice, device: torch.device) -> Tensor:
        """cos and then sin of a stretch, positions last: float32 `[r, n]`; made by the first layer that asks."""
        key = ("bias across", positions.start, positions.stop, device)
        if key not in forward.readings:
            cos_sin = self.rotation.across(positions.start, positions.stop, device)
            forward.readings[key] = torch.cat(cos_sin) * self.rotation.scaling
        table: Tensor = forward.readings[key]
        return table

    def _between(self, forward: Forward, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of a stretch, float32 `[1, n, r/2]`, each from its own angle: a token's are the same whatever is encoded with
        it. Made by the first layer that asks."""
        key = ("bias along", start, stop, device)
        if key not in forward.readings:
            cos, sin = self._at(torch.arange(start, stop, device=device))
            forward.readings[key] = cos[None], sin[None]
        found: tuple[Tensor, Tensor] = forward.readings[key]
        return found

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions`, int64 of any shape, as the model scales them: float32 `[*positions.shape, r/2]`."""
        cos, sin = (part * self.rotation.scaling for part in self.rotation.at(positions))
        return cos, sin
