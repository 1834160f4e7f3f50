"""Float64 decoding of corrected codecs (GEAR): x^ = D + A B^T + S, from the stored fields alone, without code of the kernels.

Outliers are added entry by entry, low-rank factors head by head and segment by segment. T is tokens, D (as a shape) channels.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from calib.runtime.stages.codec import Corrected
from calib.runtime.stages.correction import LowRank, Outliers


def corrected(codec: Corrected, block: Mapping[str, Tensor], x: np.ndarray) -> np.ndarray:
    """Return `x [..., kv_heads, T, D]`, the tokens decoded by the inner codec, with the stored corrections added."""
    x = x.copy()
    if codec.low_rank is not None:
        add_factors(codec.low_rank, block, x)
    if codec.outliers is not None:
        add_outliers(codec.outliers, block, x)
    return x


def add_factors(low_rank: LowRank, block: Mapping[str, Tensor], x: np.ndarray) -> None:
    """Add A B^T of every head and segment to `x`. A calibrated basis B is the same for all tokens."""
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
    """Add every stored outlier to `x` at its token and channel."""
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
    """Add the outlier lists of one row to `x [kv_heads, T, D]`, span by span of up to 512 tokens.

    Lists of keys store each entry's channel and, in `begins`, where a token's entries begin in its span. Lists of values have no
    `begins`; they store channel * span + token in the span, which rises when every 32nd entry is read, lane after lane.
    """
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
    """Stored indices as int64; int16 ones are read as unsigned."""
    if index is None:
        return None
    found = index.numpy()
    return found.view(np.uint16).astype(np.int64) if found.dtype == np.int16 else found.astype(np.int64)
