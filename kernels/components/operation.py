"""Projects tokens on a calibrated basis and quantises the components, in one Triton kernel on a GPU.

Where `supported` is False the stages compute the same bits in plain torch (`runtime/stages/transform/basis.py`, `codec/mixed.py`,
`codec/sized.py`).
"""

from torch import Tensor

from calib.kernels.components.projection import Projection
from calib.kernels.dispatch import prefers_triton
from calib.kernels.pack.reference import Widths


def supported(x: Tensor, counts: tuple[int, ...]) -> bool:
    """Whether the kernel supports tokens like `x [rows, kv_heads, T, D]` with `counts` words of each head."""
    if not x.is_floating_point() or not any(counts) or not prefers_triton(x.device):
        return False
    from calib.kernels.components import triton

    return x.shape[-1] <= triton.MOST_CHANNELS


def component_words(
    x: Tensor, projection: Projection, widths: Widths, counts: tuple[int, ...], weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Quantises the components y of tokens, c = clamp(round(y / s + (2^b - 1) / 2), 0, 2^b - 1) with s = 2^(1 - b), and packs them.

    Args:
        x: `[rows, kv_heads, T, D]`, of a floating dtype, finite.
        projection: basis, with N = `len(widths) * max(counts)` components in plane form (`kernels/pack/heads.py`).
        widths: bits b of the fields of a word, one per component of a word.
        counts: words of each KV head.
        weights: float32 `[kv_heads, 1, N]`: the size of a token is the one nearest to the norm of y * weights, and y is divided by
            it; None: no sizes.

    Returns:
        words int16 `[rows, 1, T, sum(counts)]`, those of all heads in one row, and numbers of the sizes, int16 `[rows, kv_heads,
        T]`, or None.
    """
    from calib.kernels.components import triton

    return triton.projected(x, projection, widths, counts, weights, coded=True)


def components(
    x: Tensor, projection: Projection, widths: Widths, counts: tuple[int, ...], weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As `component_words`, but returns the components y, divided by the tokens' sizes, float32 `[rows, kv_heads, T, N]`."""
    from calib.kernels.components import triton

    return triton.projected(x, projection, widths, counts, weights, coded=False)
