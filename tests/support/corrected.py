"""What a corrected codec holds, entry by entry: x^ = D + A B^T + S, float64, from the stored fields alone.

A list of outliers is met one after the other, factors one segment after the other; no code of the kernels.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from calib.runtime.stages.codec import Corrected
from calib.runtime.stages.correction import LowRank, Outliers


def corrected(codec: Corrected, block: Mapping[str, Tensor], x: np.ndarray) -> np.ndarray:
    """Adds to `x [..., kv_heads, T, D]`, what the codec inside has made, what the corrections hold."""
    x = x.copy()
    if codec.low_rank is not None:
        add_factors(codec.low_rank, block, x)
    if codec.outliers is not None:
        add_outliers(codec.outliers, block, x)
    return x


def add_factors(low_rank: LowRank, block: Mapping[str, Tensor], x: np.ndarray) -> None:
    """A B^T of every head and segment; the basis of an artifact is one for all tokens."""
    heads, tokens, channels = x.shape[-3:]
    coefficients = block["low_rank.coefficients"].double().numpy()
    rank = coefficients.shape[-1]
    for head in range(heads):
        own = coefficients[..., min(head, coefficients.shape[-3] - 1), :, :]
        if low_rank.basis is not None:
            x[..., head, :, :] += own @ low_rank.basis[head, :rank].half().double().numpy()
            continue
        bases = block["low_rank.basis"][head].double().numpy()
        if not tokens:
            continue
        size = tokens // len(bases)
        for number, basis in enumerate(bases):
            part = slice(number * size, number * size + size)
            x[head, part] += own[part] @ basis.reshape(rank, channels)


def add_outliers(outliers: Outliers, block: Mapping[str, Tensor], x: np.ndarray) -> None:
    """Every stored entry at its position."""
    heads, tokens, channels = x.shape[-3:]
    delta = block["outliers.delta"].double().numpy()
    if "outliers.starts" in block:
        fields = {name.removeprefix("outliers."): part for name, part in block.items() if name.startswith("outliers.")}
        for row in np.ndindex(*x.shape[:-3]):
            add_list({name: part[row] for name, part in fields.items()}, delta[row], x[row])
        return
    token, channel = (unsigned(block.get(f"outliers.{name}")) for name in ("tokens", "channels"))
    if not delta.size:
        return
    *row, head, line, entry = np.indices(delta.shape)
    if outliers.ranked == "channels":
        at, number = line, channel
    else:
        at = token + line * (tokens // delta.shape[-2])
        number = entry % channels if outliers.ranked == "tokens" else channel
    if delta.shape[-3] != heads:
        head, number = np.divmod(number, channels)
    np.add.at(x, (*row, head, at, number), delta)


def add_list(fields: Mapping[str, Tensor], delta: np.ndarray, x: np.ndarray) -> None:
    """Of a row `x [kv_heads, T, D]`, head by head and stretch by stretch: keys' lists tell where each token begins, values' each
    entry's channel and token."""
    (heads, tokens, channels), delta = x.shape, delta.reshape(-1)
    span = min(512, 2 ** (16 - (channels - 1).bit_length()))
    index, starts = unsigned(fields["index"]).reshape(-1), fields["starts"].numpy().reshape(heads, -1)
    begins = unsigned(fields["begins"]).reshape(heads, -1) if "begins" in fields else None
    for head in range(heads):
        for token in range(0 if begins is None else tokens):
            first, last = (starts[head, at // span] + begins[head, at] for at in (token, token + 1))
            assert len(set(index[first:last])) == last - first
            x[head, token, index[first:last]] += delta[first:last]
        for stretch in range(-(-tokens // span) if begins is None else 0):
            own = slice(starts[head, stretch], starts[head, stretch + 1])
            channel, token = index[own] // span, stretch * span + index[own] % span
            lanes = [index[own][lane::32] for lane in range(32)]
            assert (np.diff(np.concatenate(lanes)) > 0).all(), "by channel, lane after lane"
            x[head, token, channel] += delta[own]


def unsigned(index: Tensor | None) -> np.ndarray | None:
    """Stored positions as numbers: 16 bits have no sign."""
    if index is None:
        return None
    found = index.numpy()
    return found.view(np.uint16).astype(np.int64) if found.dtype == np.int16 else found.astype(np.int64)
