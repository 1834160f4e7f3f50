"""Tokens in a calibrated basis, and their words, where a kernel serves them: Triton on a GPU.

For what is not `supported` the stages do the same in plain torch (`runtime/stages/transform/basis.py`, `codec/mixed.py`,
`codec/sized.py`): the same bits.
"""

from torch import Tensor

from calib.kernels.components.projection import Projection
from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import Widths


def supported(x: Tensor, counts: tuple[int, ...]) -> bool:
    """Whether a kernel makes components of tokens like `x [rows, kv_heads, T, D]` with so many words of each head."""
    if not x.is_floating_point() or not any(counts) or not prefers_triton(x.device):
        return False
    from calib.kernels.components import triton

    return x.shape[-1] <= triton.MOST_CHANNELS


def component_words(
    x: Tensor, projection: Projection, widths: Widths, counts: tuple[int, ...], weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Codes of the components of tokens, c = clamp(round(y / s + (2^b - 1) / 2), 0, 2^b - 1) with s = 2^(1 - b), in words.

    Args:
        x: `[rows, kv_heads, T, D]`, of a floating dtype, finite.
        projection: their basis, of `len(widths) * max(counts)` components in plane form (`kernels/pack/heads.py`).
        widths: bits of a word's fields, b of each component.
        counts: words of each KV head.
        weights: float32 `[kv_heads, 1, N]` of sized tokens, the root of whose sum of squared y times weights is nearest to a size,
            by which y is divided; None without sizes.

    Returns:
        int16 `[rows, 1, T, sum(counts)]`, all heads' words side by side, and the numbers of the sizes, int16 `[rows, kv_heads, T]`.
    """
    from calib.kernels.components import triton

    return triton.projected(x, projection, widths, counts, weights, coded=True)


def components(
    x: Tensor, projection: Projection, widths: Widths, counts: tuple[int, ...], weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same, y over the tokens' sizes itself: float32 `[rows, kv_heads, T, N]`."""
    from calib.kernels.components import triton

    return triton.projected(x, projection, widths, counts, weights, coded=False)
