"""Float64 decoding of the sparse codec (CSR): x^ = sum of coefficient * atom, from the stored bytes alone.

Written from kernels/pack/README.md and the formats' description, without code of the kernels.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from calib.runtime.stages.codec import Sparse


def numbers(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Unpack `count` numbers of `width` bits, int64 `[..., count]`, from `packed` bytes `[..., B]`.

    A number is split into parts of 8, 4, 2 and 1 bits, lowest bits first; each part of all numbers is packed plane by plane.
    """
    found, at, first = np.zeros((*packed.shape[:-1], count), dtype=np.int64), 0, 0
    for size in [8] * (width // 8) + [size for size in (4, 2, 1) if width % 8 & size]:
        run = -(-count * size // 8)
        for number in range(count):
            field, byte = divmod(number, run)
            part = packed[..., at + byte].astype(np.int64) >> (size * field) & (2**size - 1)
            found[..., number] |= part << first
        at, first = at + run, first + size
    assert at == packed.shape[-1]
    return found


def coefficients(codec: Sparse, block: Mapping[str, Tensor]) -> np.ndarray:
    """The stored coefficients, float64 `[..., pairs]`: float16, fp8 (e4m3) bytes, or signed codes times a scale."""
    form, kept = codec.coefficients.form, block["coefficients"]
    if form == "fp16":
        return kept.double().numpy()
    if form == "fp8":
        byte = kept.numpy().astype(np.int64)
        exponent, fraction = byte >> 3 & 15, byte & 7
        size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
        return np.where(byte & 128, -size, size)
    most = 2 ** (form - 1) - 1
    codes = numbers(kept.numpy(), form, codec.pairs) - most
    return codes * block["scale"].double().numpy()


def summed(codec: Sparse, block: Mapping[str, Tensor], channels: int, online: Tensor | None) -> Tensor:
    """x^, float64 `[..., kv_heads, T, channels]`. Atoms are numbered from the codec's offline ones on, followed by the row's
    `online [M, channels / chunks]`."""
    parts = [part.double().numpy() for part in (codec.offline and codec.offline.tensor, online) if part is not None]
    atoms = np.concatenate(parts)
    indices = block["indices"].numpy()
    if codec.index == "int16":
        indices = indices.view(np.uint16).astype(np.int64)
    else:
        width = 1
        while 2**width < len(atoms):
            width += 1
        indices = numbers(indices, width, codec.pairs)
    kept = coefficients(codec, block)
    x = np.zeros((*indices.shape[:-1], channels))
    size = channels // codec.chunks
    for pair in range(codec.pairs):
        chunk = slice(pair // codec.sparsity * size, pair // codec.sparsity * size + size)
        x[..., chunk] += kept[..., pair, None] * atoms[indices[..., pair]]
    return torch.from_numpy(x)
