"""The error that calibration minimises: the change of the attention output when keys or values are replaced by x^.

It is measured on some query rows in the second half of a sequence, where the cache is long. These are enough for a mean,
and the cost falls from T x T to rows x T for T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.capture.sample import LayerSample
from calib.errors import RunError
from calib.statistics.forms import GROUP


def causal_mask(rows: Tensor, tokens: int, window: int | None) -> Tensor:
    """Returns the causal mask that is added to the logits of query rows: float32 `[1, 1, rows, tokens]`, 0 or -inf.

    Args:
        rows: int64 `[rows]`, each query's position in the sequence.
        tokens: number of keys.
        window: the sliding window in tokens, the query's own included; None: no window.
    """
    key, query = torch.arange(tokens, device=rows.device), rows[:, None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    return torch.zeros(hidden.shape, dtype=torch.float32, device=rows.device).masked_fill_(hidden, -torch.inf)[
        None, None
    ]


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Returns the attention probabilities, float32 `[batch, kv_heads, group, rows, tokens]`; group: query heads of a KV head.

    Args:
        queries: `[batch, query_heads, rows, head_dim]`.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        mask: as from `causal_mask`.
        scaling: factor on q.k before the softmax.
        softcap: logits become softcap * tanh(logits / softcap); None: no softcap.
    """
    queries = queries.float().unflatten(1, (keys.shape[1], -1))
    logits = (queries.flatten(2, 3) @ keys.float().mT).unflatten(2, queries.shape[2:4]).mul_(scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.add_(mask[:, :, None]).softmax(-1)


@dataclass(frozen=True, eq=False)
class Reference:
    """Exact attention of some query rows of a sample without padding.

    Attributes:
        sample: the sample, for its scaling and softcap.
        queries: `[batch, query_heads, rows, head_dim]`.
        keys, values: float32 `[batch, kv_heads, tokens, head_dim]`, tokens a multiple of 32.
        mask: as from `causal_mask`.
        weights: attention probabilities, float32 `[batch, kv_heads, group, rows, tokens]`.
        output: float32 `[batch, kv_heads, group, rows, head_dim]`.
    """

    sample: LayerSample
    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    weights: Tensor
    output: Tensor

    @classmethod
    def of(cls, sample: LayerSample, rows: int) -> "Reference":
        """Computes the attention of `rows` query rows, evenly spread over the second half of the sequence.

        Tokens beyond the last whole group of 32 are cut off. Raises RunError for a sequence of fewer than 32 tokens.
        """
        tokens = sample.keys.shape[2] // GROUP * GROUP
        if tokens == 0:
            raise RunError(f"a sequence of {sample.keys.shape[2]} tokens is too short: at least {GROUP} are needed")
        # Computed on the CPU: another device may round differently.
        positions = torch.linspace(tokens // 2, tokens - 1, min(rows, tokens - tokens // 2), dtype=torch.float32).long()
        positions = positions.to(sample.queries.device)
        queries = sample.queries[:, :, positions]
        keys, values = sample.keys[:, :, :tokens].float(), sample.values[:, :, :tokens].float()
        mask = causal_mask(positions, tokens, sample.window)
        weights = attention_weights(queries, keys, mask, sample.scaling, sample.softcap)
        return cls(sample, queries, keys, values, mask, weights, mixed(weights, values))

    def output_with(self, keys: Tensor | None, values: Tensor | None) -> Tensor:
        """Returns the output with keys, values or both replaced by tensors of the same shape; None leaves them exact."""
        weights = self.weights
        if keys is not None:
            weights = attention_weights(self.queries, keys, self.mask, self.sample.scaling, self.sample.softcap)
        return mixed(weights, self.values if values is None else values)

    def error(self, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Returns the squared error of the output, summed over batch, rows, query heads and channels: float64 `[kv_heads]`."""
        return square(self.output_with(keys, values) - self.output)

    def energy(self) -> Tensor:
        """Returns the squared norm of the exact output, summed like the error: float64 `[kv_heads]`."""
        return square(self.output)


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Returns the attention output, sum_t p_t v_t: `[batch, kv_heads, group, rows, head_dim]`."""
    return (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])


def square(x: Tensor) -> Tensor:
    """Returns the sum of squares for each KV head: float64 `[kv_heads]`."""
    return x.double().square().sum((0, 2, 3, 4))
