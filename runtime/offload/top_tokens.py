"""SpeCache's store (arXiv:2503.16163): a low-bit copy on the device finds the tokens that matter; their exact pairs replace it.

A speculative token, the predicted next one, attends together with the true token. The tokens that it attends to most are
prefetched during the step, so that the next step has them. Scores are attention probabilities, those of fetched tokens
included.
"""

import torch
from torch import Tensor

from calib.kernels.top_k.operation import top_k
from calib.kernels.upload import upload
from calib.runtime.attend.fetched_tokens import FetchedTokens
from calib.runtime.attend.request import AttendRequest
from calib.runtime.logits import Logits
from calib.runtime.offload.store import OffloadStore
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import PAGE_TOKENS


class TopTokensStore(OffloadStore):
    """`chosen` are the tokens to fetch for the next step, by rows, until `store` has written the newest tokens to the host."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.chosen: dict[range, Tensor] = {}

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention of a prompt, of a step with or without a speculative token, or of a longer forward, which reads the host
        exactly."""
        forward, rows = request.forward, request.rows
        if not self.policy.k or not any(forward.before[row] for row in rows):
            return self.on_device(request)
        if forward.speculative:
            pool = self._fetched_tokens(request, asks=True)
            output = self.on_device(request._replace(fetched=pool))
            self.chosen[rows] = self._heaviest(pool, forward.after, request)
            return output
        if request.given.query.shape[2] > 1:
            if request.observe and self.observes:
                self.on_device(request)
            return self.exact_on_host(request)
        nothing = self._fetched_tokens(request, asks=True, pool=False)
        self.on_device(request._replace(observe=False, fetched=nothing))
        self._fetch(rows, self._heaviest(nothing, forward.before, request), nothing.reach)
        return self.on_device(request._replace(fetched=self._fetched_tokens(request, asks=False)))

    def fetchable(self, length: int) -> int:
        return min(self.policy.k, self.sequences.encoded(0, length))

    def store(self, forward: Forward, keys: Tensor, values: Tensor) -> None:
        """Stores new tokens in both stores, then fetches the chosen ones."""
        super().store(forward, keys, values)
        chosen, self.chosen = self.chosen, {}
        for rows, tokens in chosen.items():
            self._fetch(rows, tokens, max(forward.after) + 1)

    def _fetch(self, rows: range, tokens: Tensor, reach: int) -> None:
        self.pool.fit(tokens.shape[2], self.policy.entries)
        self.pool.fetch(rows, tokens, self.host, reach)

    def _fetched_tokens(self, request: AttendRequest, asks: bool, pool: bool = True) -> FetchedTokens:
        longest = max(request.forward.before[row] for row in request.rows) + request.given.query.shape[2]
        reach = self.sequences.sinks + -(-longest // PAGE_TOKENS) * PAGE_TOKENS
        positions, keys, values = self.pool.of(request.rows)
        if not pool:
            positions, keys, values = positions[:, :, :0], keys[:, :, :0], values[:, :, :0]
        return FetchedTokens(positions, keys, values, reach, asks=asks)

    def _heaviest(self, asked: FetchedTokens, lengths: list[int], request: AttendRequest) -> Tensor:
        """The k tokens with the most attention mass among those encoded at these `lengths`: int64 `[rows, kv_heads, n]`."""
        assert asked.mass is not None
        readings, key = request.forward.readings, ("encoded", request.rows, tuple(lengths), asked.mass.device)
        if key not in readings:  # the same for every layer
            readings[key] = self._encoded(lengths, request.rows, request.logits, asked.mass.device)
        most, ends = readings[key]
        return top_k(asked.mass, min(self.policy.k, most), ends)

    def _encoded(self, lengths: list[int], rows: range, logits: Logits, device: torch.device) -> tuple[int, Tensor]:
        """The largest number of encoded tokens in any row, and int32 `[rows, 2]`: the position of the first encoded token that
        the next query sees, and the position after the last."""
        sinks, counts = self.sequences.sinks, [self.sequences.encoded(row, lengths[row]) for row in rows]
        seen = [0 if logits.sliding is None else lengths[row] - logits.sliding + 1 for row in rows]
        ends = [
            number for first, count in zip(seen, counts, strict=True) for number in (max(sinks, first), sinks + count)
        ]
        return max(counts), upload(ends, torch.int32, device).view(len(rows), 2)
