"""InfLLM's store (arXiv:2402.04617): blocks that have left the local window are fetched where queries need them.

On the device a block is represented by a few of its keys, those that later queries attended to most. The blocks whose
representatives score highest with a forward's queries are fetched and attended exactly. All their tokens get one position, that
just before the local window, for which keys are kept before RoPE.
"""

from typing import Any

import torch
from torch import Tensor

from calib.kernels.top_k.operation import top_k
from calib.runtime.attend.fetched_tokens import EMPTY, FetchedTokens
from calib.runtime.attend.request import AttendRequest
from calib.runtime.device.row_index import row_index
from calib.runtime.offload.store import OffloadStore
from calib.runtime.paging.forward import Forward
from calib.runtime.paging.page_numbers import PAGE_TOKENS
from calib.runtime.rotation import Rotation
from calib.runtime.tiered.rope_on_read import unrotated


class TopBlocksStore(OffloadStore):
    """`low` is a `LocalStore`: initial tokens, local ones, and the representatives of the blocks that left the window."""

    low: Any

    def attend(self, request: AttendRequest) -> Tensor:
        """Attention over what the device holds, and over the blocks with the highest-scoring representatives, which are fetched."""
        forward, rows, tiering = request.forward, request.rows, self.low.tiering
        blocks = [tiering.blocks(forward.before[row]) for row in rows]
        if not self.policy.fetched or not any(blocks):
            return self.on_device(request)
        cos_sin = self.low.cos_sin_to_blocks(forward, rows, request.given.query.device)
        chosen = self._chosen(request, blocks, cos_sin)
        self.pool.fit(chosen.shape[2], self.policy.entries)
        reach = max(forward.before[row] for row in rows) + PAGE_TOKENS
        self.pool.fetch(rows, chosen, self.host, reach)
        return self.on_device(request._replace(fetched=FetchedTokens(*self.pool.of(rows), reach, cos_sin)))

    def fetchable(self, length: int) -> int:
        return min(self.policy.fetched, self.low.tiering.blocks(length)) * self.policy.block

    def _chosen(self, request: AttendRequest, blocks: list[int], cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
        """The tokens of the best blocks, int64 `[rows, kv_heads, n]`. A block's score is the sum of q.k over the queries and its
        representatives, averaged over the query heads of a KV head."""
        forward, rows, logits, query = request.forward, request.rows, request.logits, request.given.query
        keys = self.low.representatives[rows.start : rows.stop, :, : max(blocks)]  # [rows, kv_heads, blocks, r, D]
        asked = query.float() * logits.scale
        if cos_sin is not None:
            asked = Rotation.rotated(asked, *cos_sin)
        asked = asked.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)  # scores are linear in the query
        scores = (keys.float().sum(3) @ asked[..., None])[..., 0]
        size, initial = self.policy.block, self.low.tiering.initial
        block = torch.arange(max(blocks), device=query.device)
        missing = block >= forward.tensor(f"blocks of {rows}", lambda _: blocks, query.device)[:, None, None]
        if logits.sliding is not None:  # blocks of which the first query sees no token are not chosen
            held = forward.tensor(f"held by {rows}", lambda step: [step.before[row] for row in rows], query.device)
            missing = missing | (initial - 1 + (block + 1) * size <= held[:, None, None] - logits.sliding)
        scores = scores.masked_fill(missing, -torch.inf)
        numbers = top_k(scores, min(self.policy.fetched, max(blocks)))
        tokens = initial + numbers[..., None] * size + torch.arange(size, device=query.device)
        return tokens.masked_fill((numbers == EMPTY)[..., None], EMPTY).flatten(2)

    def keys_on_host(self, forward: Forward, keys: Tensor) -> Tensor:
        """The keys before RoPE, if fetched blocks share one position; else unchanged."""
        if not self.low.relocates:
            return keys
        rotated = torch.zeros_like(keys)
        for rows in forward.equal_length_groups:
            own = forward.real(keys, rows)
            span = range(forward.before[rows[0]], forward.before[rows[0]] + own.shape[2])
            assert self.context.rotation is not None
            back = unrotated(forward, self.context.rotation, own, [span]).to(keys.dtype)
            if forward.columns is None:
                rotated[row_index(rows, keys.device)] = back
            else:
                rotated[rows[0], :, forward.columns[rows[0]].to(keys.device)] = back[0]
        return rotated
