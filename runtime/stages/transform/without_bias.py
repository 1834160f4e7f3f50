"""Keys without the bias of their projection, which is the same for every token and need not be encoded with every key.

    k_t = R_t (W x_t + b)       encoded: y_t = T (k_t - R_t b)       q.k_t = (T^-T q).y_t + q.R_t b

R_t is RoPE at the token's position t. RoPE rotates pairs of channels (1, 2) by an angle t w; the last term is a sum over pairs,

    q.R_t b = sum (q_1 b_1 + q_2 b_2) cos t w + (q_2 b_1 - q_1 b_2) sin t w,

and channels that RoPE does not rotate add a constant. So attention has one more product, of numbers of the query with cos and sin
of the positions, which are the same for all layers, rows and heads. The scores are right for any vector b, not only for the bias.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.kernels.quantise.prologue import Prologue
from calib.runtime.rotation import Rotation
from calib.runtime.stages.contract import Transform


@dataclass(frozen=True, eq=False)
class WithoutBias(Transform):
    """`forward` and the folds are those of `inner`, which does not depend on positions, for keys from which `at` was subtracted.

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
        """The factors of cos and sin in q.R_t b, `[..., kv_heads, rows, r]`, for `query [..., kv_heads, rows, D]` where RoPE
        rotates `turning` = r / 2 pairs; and the constant term `[..., kv_heads, rows, 1]`, None where RoPE rotates all channels."""
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
        """`inner`'s, without q.R_t b, for which `of_query` is."""
        return self.inner.fold_query(query)

    def fold_output(self, mixed: Tensor, mass: Tensor) -> Tensor:
        """`inner`'s: values have no part that depends on positions."""
        return self.inner.fold_output(mixed, mass)

    def tensors(self) -> list[Tensor]:
        """`inner`'s and the bias."""
        return self.inner.tensors() + ([] if self.bias is None else [self.bias])

    def prologue(self) -> Prologue | None:
        """As for `inner`."""
        return self.inner.prologue()
