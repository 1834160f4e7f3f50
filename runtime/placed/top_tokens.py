"""SpeCache's store (arXiv:2503.16163): a low-bit copy finds the tokens that matter, and their exact pairs replace it there.

A guess, the token that will probably follow, is attended beside the true one; what it looks at is fetched while the rest of
the step is computed, so that the next step has it. Scores are probabilities over what was attended, residents included.
"""

import torch
from torch import Tensor

from calib.kernels.top_k.operation import top_k
from calib.runtime.beside import Beside
from calib.runtime.logits import Logits
from calib.runtime.numbers import upload
from calib.runtime.pages import PAGE_TOKENS
from calib.runtime.placed.store import PlacedStore
from calib.runtime.rows import Forward
from calib.runtime.store import Given


class TopTokensStore(PlacedStore):
    """`chosen` are the tokens to hold from the next step on, by rows, until `store` has brought the newest to the host."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.chosen: dict[range, Tensor] = {}

    def attend(
        self,
        forward: Forward,
        rows: range,
        logits: Logits,
        given: Given,
        observe: bool,
        beside: Beside | None = None,
    ) -> Tensor:
        """A prompt, a step with a guess, a step of its own, or a longer forward, which is exact."""
        if not self.policy.k or not any(forward.before[row] for row in rows):
            return self.on_device(forward, rows, logits, given, observe)
        if forward.guess:
            residents = self._beside(forward, rows, given, asks=True)
            output = self.on_device(forward, rows, logits, given, observe, residents)
            self.chosen[rows] = self._heaviest(residents, forward.after, forward, rows, logits)
            return output
        if given.query.shape[2] > 1:
            if observe and self.observes:
                self.on_device(forward, rows, logits, given, observe)
            return self.exact_on_host(forward, rows, logits, given)
        nothing = self._beside(forward, rows, given, asks=True, residents=False)
        self.on_device(forward, rows, logits, given, False, nothing)
        self._hold(rows, self._heaviest(nothing, forward.before, forward, rows, logits), nothing.reach)
        return self.on_device(forward, rows, logits, given, observe, self._beside(forward, rows, given, asks=False))

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Into both places; then what was chosen is fetched."""
        super().store(forward, keys, values)
        chosen, self.chosen = self.chosen, {}
        for rows, tokens in chosen.items():
            self._hold(rows, tokens, max(forward.after) + 1)

    def _hold(self, rows: range, tokens: Tensor, reach: int) -> None:
        self.residents.fit(tokens.shape[2], self.policy.k)
        self.residents.hold(rows, tokens, self.host, reach)

    def _beside(self, forward: Forward, rows: range, given: Given, asks: bool, residents: bool = True) -> Beside:
        longest = max(forward.before[row] for row in rows) + given.query.shape[2]
        reach = self.rows.sinks + -(-longest // PAGE_TOKENS) * PAGE_TOKENS
        places, keys, values = self.residents.of(rows)
        if not residents:
            places, keys, values = places[:, :, :0], keys[:, :, :0], values[:, :, :0]
        return Beside(places, keys, values, reach, asks=asks)

    def _heaviest(self, asked: Beside, lengths: list[int], forward: Forward, rows: range, logits: Logits) -> Tensor:
        """The k tokens with the most attention among those encoded at these `lengths`: int64 `[rows, kv_heads, n]`."""
        assert asked.mass is not None
        key = ("not encoded", rows, tuple(lengths), asked.reach)
        if key not in forward.readings:  # the same for every layer
            forward.readings[key] = self._not_encoded(asked, lengths, rows, logits)
        most, hidden = forward.readings[key]
        return top_k(asked.mass.masked_fill_(hidden, -torch.inf), min(self.policy.k, most))

    def _not_encoded(self, asked: Beside, lengths: list[int], rows: range, logits: Logits) -> tuple[int, Tensor]:
        """The most encoded tokens of any row, and bool `[rows, 1, reach]`: places without one that the next query sees."""
        device = asked.places.device
        counts = [self.rows.encoded(row, lengths[row]) for row in rows]
        ends = upload([lengths[row] for row in rows], torch.int64, device)[:, None, None]
        places = torch.arange(asked.reach, device=device)
        hidden = places >= self.rows.sinks + upload(counts, torch.int64, device)[:, None, None]
        hidden = hidden | (places < self.rows.sinks)
        return max(counts), hidden if logits.sliding is None else hidden | (places <= ends - logits.sliding)
