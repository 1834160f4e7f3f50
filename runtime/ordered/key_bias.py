"""The folded key bias of an ordered store, rotated to the tokens' positions (`stages/transform/without_bias.py`). A token's
position is its index in its row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.runtime.paging.forward import Forward
from calib.runtime.rotation import Rotation
from calib.runtime.stages.transform import WithoutBias


@dataclass(frozen=True)
class BiasAtPositions:
    """R_t b: the bias b of a layer's keys, rotated by RoPE to position t. It is subtracted from keys before encoding, and added
    back to scores.

    If a caller's position_ids differ from the tokens' indices, another R_t b is subtracted than the model added; the same is
    added back, so attention stays correct.
    """

    stage: WithoutBias
    rotation: Rotation

    def off(self, forward: Forward, tokens: Tensor, start: int | None = None) -> Tensor:
        """Keys `[rows, kv_heads, n, D]` minus R_t b, float32. Their positions begin at `start` in all rows; with None they are
        the next token of each row of the batch."""
        if start is None:
            before = forward.tensor("positions of new keys", lambda step: step.before, tokens.device)
            cos, sin = (part[:, None, None] for part in self._at(before))
        else:
            cos, sin = self._between(forward, start, start + tokens.shape[2], tokens.device)
        return tokens.float() - self.stage.at(cos, sin)

    def whole(self, tokens: Tensor) -> Tensor:
        """The keys of a row's first tokens, `[kv_heads, n, D]`, with R_t b added back."""
        cos, sin = self._at(torch.arange(tokens.shape[1], device=tokens.device))
        return tokens + self.stage.at(cos[None], sin[None])

    def scores(self, forward: Forward, query: Tensor, positions: slice | Tensor) -> Tensor:
        """q.R_t b `[rows, kv_heads, query rows, n]`, for `query [rows, kv_heads, query rows, D]` and tokens at `positions`, a
        slice or int64 `[rows, n]`."""
        found, constant = self.stage.of_query(query, len(self.rotation.frequencies))
        if isinstance(positions, slice):
            table = self._table(forward, positions, query.device)
        else:
            table = torch.cat(self._at(positions), -1).mT[:, None]
        scores = found @ table
        return scores if constant is None else scores + constant

    def _table(self, forward: Forward, positions: slice, device: torch.device) -> Tensor:
        """cos and then sin of a slice of positions, concatenated: float32 `[r, n]`; computed by the first layer that asks."""
        key = ("bias across", positions.start, positions.stop, device)
        if key not in forward.readings:
            cos_sin = self.rotation.across(positions.start, positions.stop, device)
            forward.readings[key] = torch.cat(cos_sin) * self.rotation.scaling
        table: Tensor = forward.readings[key]
        return table

    def _between(self, forward: Forward, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of positions, float32 `[1, n, r/2]`, each from its own angle, so that they do not depend on which tokens
        are encoded together. Computed by the first layer that asks."""
        key = ("bias along", start, stop, device)
        if key not in forward.readings:
            cos, sin = self._at(torch.arange(start, stop, device=device))
            forward.readings[key] = cos[None], sin[None]
        found: tuple[Tensor, Tensor] = forward.readings[key]
        return found

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions`, int64 of any shape, times the model's scaling: float32 `[*positions.shape, r/2]`."""
        cos, sin = (part * self.rotation.scaling for part in self.rotation.at(positions))
        return cos, sin
