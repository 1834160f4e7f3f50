"""What one attention layer sees of one batch of tokens: the unit in which everything is measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

Sink = Callable[["LayerSample"], None]

SINKS = 4  # a sequence's first tokens, which methods with a transform keep exact: models park attention on them


@dataclass(frozen=True, eq=False)
class LayerSample:
    """One layer's queries, keys and values of one batch, in the model's dtype and on the layer's device.

    Attributes:
        layer: index of the attention layer in the model.
        queries: `[batch, query_heads, tokens, head_dim]`, after RoPE.
        keys: `[batch, kv_heads, tokens, head_dim]`, after RoPE: what a cache stores.
        keys_before_rope: the same shape, before RoPE (after the key norm where there is one); None where the model
            has no key projection of its own (fused projections) or norms keys behind RoPE.
        values: `[batch, kv_heads, tokens, head_dim]`.
        mask: bool `[batch, tokens]`, True for real tokens; padding enters no statistic.
        positions: int64 `[batch, tokens]`, the positions RoPE used.
        index: int64 `[batch, tokens]`, each token's number in the corpus, whatever the batch or process.
        scaling: factor on q.k before the softmax.
        softcap: logits become softcap * tanh(logits / softcap); None where the model has none.
        window: how many tokens back this layer looks, its own included; None for all.
        taken_at: where keys and values are derivatives: the sample that they are taken at.
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
        """int64 `[batch, tokens]`: each token's number in its sequence, wherever that begins."""
        return self.positions - self.positions.amin(-1, keepdim=True)

    def without_padding(self) -> Iterator["LayerSample"]:
        """Yields the sample itself where no token is padding, else each row alone, cut to its real tokens.

        What groups tokens (a quantiser) must not see padding between or beside them.
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
