"""Keys without the bias of their projection: what is the same for every token is not stored with every token.

    k_t = R_t (W x_t + b)       encoded: y_t = T (k_t - R_t b)       q.k_t = (T^-T q).y_t + q.R_t b

R_t is RoPE at the token's position t. With pairs of channels (1, 2) that turn by t w each, the last term is a sum over pairs,

    q.R_t b = sum (q_1 b_1 + q_2 b_2) cos t w + (q_2 b_1 - q_1 b_2) sin t w,

and what RoPE leaves alone adds a constant. So attention has one product more, of the query's numbers with cos and sin of positions,
which are the same for all layers, rows and heads. Whatever vector b is, scores are those of the keys: it need not be the bias.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.quantise.prologue import Prologue
from calib.runtime.rotation import Rotation
from calib.runtime.stages.contract import Transform


@dataclass(frozen=True, eq=False)
class WithoutBias(Transform):
    """T itself does not know positions: `forward` and the folds are `inner`'s, on keys that `at` was taken off.

    Args:
        inner: T.
        bias: b, float32 `[kv_heads, 1, D]`; None until the model is known.
    """

    inner: Transform
    bias: Tensor | None = None

    @property
    def key_bias(self) -> "WithoutBias":
        """Itself."""
        return self

    def with_bias(self, bias: Tensor) -> "WithoutBias":
        """The same for `bias [kv_heads, D]`, of any float dtype."""
        return replace(self, bias=bias.detach().float()[:, None])

    def at(self, cos: Tensor, sin: Tensor) -> Tensor:
        """R_t b, float32 `[..., kv_heads, n, D]`, of `cos` and `sin [..., 1, n, r/2]` of the positions t."""
        return Rotation.rotated(self._bias.expand(*cos.shape[:-3], -1, cos.shape[-2], -1), cos, sin)

    def of_query(self, query: Tensor, turning: int) -> tuple[Tensor, Tensor | None]:
        """What `query [..., kv_heads, rows, D]` gives to cos and sin of positions, `[..., kv_heads, rows, r]`, where RoPE turns
        `turning` pairs, r / 2; and the constant besides, `[..., kv_heads, rows, 1]`, None where RoPE turns all channels."""
        rotated = 2 * turning
        (q1, q2), (b1, b2) = (part[..., :rotated].unflatten(-1, (2, -1)).unbind(-2) for part in (query, self._bias))
        found = torch.cat([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], -1)
        if query.shape[-1] == rotated:
            return found, None
        return found, (query[..., rotated:] * self._bias[..., rotated:]).sum(-1, keepdim=True)

    @property
    def _bias(self) -> Tensor:
        assert self.bias is not None, "a bias is folded that no model has given"
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        """`inner`'s, of keys without their bias."""
        return self.inner.forward(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Keys without their bias."""
        return self.inner.inverse(y)

    def fold_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """`inner`'s; `of_query` has the rest."""
        return self.inner.fold_query(query)

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """`inner`'s: values have no part that follows from positions."""
        return self.inner.fold_output(mixed, mass)

    def tensors(self) -> list[Tensor]:
        """`inner`'s and the bias."""
        return self.inner.tensors() + ([] if self.bias is None else [self.bias])

    def prologue(self) -> Prologue | None:
        """`inner`'s."""
        return self.inner.prologue()
