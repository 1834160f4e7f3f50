"""Queries, keys and values of one attention layer for one batch of tokens: the input of every statistic."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

Sink = Callable[["LayerSample"], None]

SINKS = 4  # first tokens of a sequence (attention sinks), which methods with a transform keep exact


@dataclass(frozen=True, eq=False)
class LayerSample:
    """One layer's queries, keys and values for one batch, in the model's dtype and on the layer's device.

    Attributes:
        layer: index of the attention layer in the model.
        queries: `[batch, query_heads, tokens, head_dim]`, after RoPE.
        keys: `[batch, kv_heads, tokens, head_dim]`, after RoPE, as a cache of transformers stores them.
        keys_before_rope: the same shape, before RoPE and after the key norm, if any; None if the model has fused
            projections or norms keys after RoPE.
        values: `[batch, kv_heads, tokens, head_dim]`.
        mask: bool `[batch, tokens]`, True for real tokens; padding enters no statistic.
        positions: int64 `[batch, tokens]`, the positions RoPE used.
        index: int64 `[batch, tokens]`, each token's number in the corpus, whatever the batch or process.
        scaling: factor on q.k before the softmax.
        softcap: logits become softcap * tanh(logits / softcap); None: no softcap.
        window: the sliding window in tokens, the query's own included; None: no window.
        taken_at: if keys and values are derivatives, the sample with the keys and values themselves.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    keys_before_rope: Tensor | None
    values: Tensor
    mask: Tensor
    positions: Tensor
    index: Tensor
    scaling: float
    softcap: float | None = None
    window: int | None = None
    taken_at: "LayerSample | None" = None

    @property
    def numbers(self) -> Tensor:
        """int64 `[batch, tokens]`: each token's number in its sequence, from 0, whatever the first position is."""
        return self.positions - self.positions.amin(-1, keepdim=True)

    def without_padding(self) -> Iterator["LayerSample"]:
        """Yields the sample itself if it has no padding, else each batch row alone, cut to its real tokens.

        For statistics that group tokens, such as a quantiser's, which must not count padding.
        """
        if bool(self.mask.all()):
            yield self
            return
        for row, mask in enumerate(self.mask):
            if not bool(mask.any()):
                continue
            before = self.keys_before_rope
            yield replace(
                self,
                queries=self.queries[row : row + 1, :, mask],
                keys=self.keys[row : row + 1, :, mask],
                keys_before_rope=None if before is None else before[row : row + 1, :, mask],
                values=self.values[row : row + 1, :, mask],
                mask=mask[None, mask],
                positions=self.positions[row : row + 1, mask],
                index=self.index[row : row + 1, mask],
            )
