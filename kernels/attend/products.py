"""Products of queries or weights with the codes of a tile, in compiled C (`cpu.py`) or plain torch (`reference.py`).

Scales and zero points are applied where there are fewest numbers: those of a whole channel to the query or the mixture, those of a
whole token to its scores or weights, and those of groups to the codes of one tile. Shapes as in `reference.py`.
"""

import torch
from torch import Tensor

from calib.kernels.attend import cpu, reference
from calib.kernels.pack.heads import spread_heads
from calib.kernels.pack.reference import Widths


def code_scores(query: Tensor, words: Tensor, bits: int | Widths, counts: tuple[int, ...] | None = None) -> Tensor:
    """Scores with integer codes, q.c: `query [..., rows, D]` float32 and a tile's words -> `[..., rows, T]` float32.

    With `counts` the words of all heads lie in one row (`kernels/pack/heads.py`), and D is P * max(counts). The caller applies
    scale and zero point.
    """
    if cpu.serves(query, words):
        return cpu.code_scores(query, words, bits, counts).squeeze(2)
    return reference.code_scores(query, words if counts is None else spread_heads(words, counts), bits)


def code_mix(
    weights: Tensor, words: Tensor, bits: int | Widths, channels: int, counts: tuple[int, ...] | None = None
) -> Tensor:
    """Mixture of integer codes, sum_t p_t c_t: `weights [..., rows, T]` float32 and a tile's words (as in `code_scores`) ->
    `[..., rows, D]` float32."""
    if cpu.serves(weights, words, channels):
        return cpu.code_mix(weights.unsqueeze(2), words, bits, channels, counts)
    return reference.code_mix(weights, words if counts is None else spread_heads(words, counts), bits, channels)


def rotated_code_scores(
    query: Tensor,
    words: Tensor,
    bits: Widths,
    counts: tuple[int, ...],
    matrix: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: Tensor | None = None,
) -> Tensor:
    """Scores q.R_t k_t with keys k_t before RoPE that are rebuilt as in `reference.keys_of_codes`: `query [..., rows, D]` float32
    -> `[..., rows, T]`. The rotations R_t are given by `cos` and `sin [..., r/2, T]`."""
    if cpu.serves(query, words) and matrix.shape[-1] <= cpu.MOST_CHANNELS and query.shape[-1] % cpu.AXES == 0:
        return cpu.rotated_scores(query, words, bits, counts, matrix, cos, sin, sizes)
    keys = reference.keys_of_codes(words, bits, counts, matrix, sizes)
    return reference.rotated_scores(query, keys, cos, sin)


def number_scores(query: Tensor, numbers: Tensor) -> Tensor:
    """Scores with unpacked integers: `query [..., rows, D]` float32, `numbers` int16 `[..., D, T]` -> `[..., rows, T]` float32."""
    if cpu.serves(query, numbers):
        return cpu.code_scores(query, numbers, None).squeeze(2)
    return query @ numbers.float()


def number_mix(weights: Tensor, numbers: Tensor) -> Tensor:
    """Mixture of unpacked integers: `weights [..., rows, T]` float32, `numbers` int16 `[..., D, T]` -> `[..., rows, D]` float32."""
    if cpu.serves(weights, numbers, numbers.shape[-2]):
        return cpu.code_mix(weights.unsqueeze(2), numbers, None, numbers.shape[-2])
    return weights @ numbers.float().mT


def rotated_number_scores(
    query: Tensor, numbers: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, sizes: Tensor | None
) -> Tensor:
    """`rotated_code_scores` for unpacked integers int16 `[..., components, T]`."""
    if cpu.serves(query, numbers) and matrix.shape[-1] <= cpu.MOST_CHANNELS and query.shape[-1] % cpu.AXES == 0:
        return cpu.rotated_scores(query, numbers, None, None, matrix, cos, sin, sizes)
    return reference.rotated_scores(query, reference.keys_of_numbers(numbers, matrix, sizes), cos, sin)


def uniform_scores(query: Tensor, words: Tensor, parameters: Tensor, bits: int) -> Tensor:
    """Scores with decoded keys, q.x^ with x^ = c s + z: `query [..., rows, D]` float32 and a tile -> `[..., rows, T]` float32."""
    channels, tokens = query.shape[-1], words.shape[-1]
    parameters = parameters.float()
    columns, blocks = parameters.shape[-2] // 2, parameters.shape[-1]
    scale, zero = parameters.chunk(2, -2)
    if (columns, blocks) == (channels, 1):
        return code_scores(query * scale.mT, words, bits) + query @ zero
    if (columns, blocks) == (1, tokens):
        return torch.addcmul(query.sum(-1, keepdim=True) * zero, code_scores(query, words, bits), scale)
    if not cpu.serves(query, words):
        return query @ reference.scaled_codes(words, parameters, bits, channels)
    sums = query.unflatten(-1, (columns, -1)).sum(-1) if columns < channels else query
    if blocks == tokens:
        parts = cpu.code_scores(query, words, bits, groups=columns)
        return (parts * scale.unsqueeze(-2)).sum(2) + sums @ zero
    return cpu.code_scores(
        query, words, bits, block=tokens // blocks, scales=_by_block(scale, channels), start=sums @ zero
    ).squeeze(2)


def uniform_mix(weights: Tensor, words: Tensor, parameters: Tensor, bits: int, channels: int) -> Tensor:
    """Mixture of decoded values, sum_t p_t x^_t: `weights [..., rows, T]` float32 and a tile -> `[..., rows, D]` float32."""
    tokens, parameters = words.shape[-1], parameters.float()
    columns, blocks = parameters.shape[-2] // 2, parameters.shape[-1]
    scale, zero = parameters.chunk(2, -2)
    if (columns, blocks) == (channels, 1):
        mixed = code_mix(weights, words, bits, channels)
        return mixed * scale.mT + weights.sum(-1, keepdim=True) * zero.mT
    if (columns, blocks) == (1, tokens):
        return code_mix(weights * scale, words, bits, channels) + weights @ zero.mT
    if not cpu.serves(weights, words, channels):
        return weights @ reference.scaled_codes(words, parameters, bits, channels).mT
    if blocks == tokens:
        mixed = cpu.code_mix(weights.unsqueeze(2) * scale.unsqueeze(-2), words, bits, channels)
        added = weights @ zero.mT
    else:
        scales = _by_block(scale, channels)
        mixed = cpu.code_mix(weights.unsqueeze(2), words, bits, channels, block=tokens // blocks, scales=scales)
        added = weights.unflatten(-1, (blocks, -1)).sum(-1) @ zero.mT
    return mixed + (added if columns == channels else _repeated(added, channels // columns))


def scaled_scores(query: Tensor, words: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Scores with codes times a scale of each channel and segment: `query [..., rows, D]` float32 and a tile of equally long
    segments with `scales [..., D, segments]` -> `[..., rows, T]`."""
    tokens, segments = words.shape[-1], scales.shape[-1]
    if cpu.serves(query, words):
        return cpu.code_scores(query, words, bits, block=tokens // segments, scales=scales.mT).squeeze(2)
    parameters = torch.cat([scales, torch.zeros_like(scales)], -2)
    return query @ reference.scaled_codes(words, parameters, bits, query.shape[-1])


def scaled_mix(weights: Tensor, words: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Mixture of codes times such scales (as in `scaled_scores`): `weights [..., rows, T]` float32 -> `[..., rows, D]`."""
    tokens, (channels, segments) = words.shape[-1], scales.shape[-2:]
    if cpu.serves(weights, words, channels):
        block = tokens // segments
        return cpu.code_mix(weights.unsqueeze(2), words, bits, channels, block=block, scales=scales.mT)
    parameters = torch.cat([scales, torch.zeros_like(scales)], -2)
    return weights @ reference.scaled_codes(words, parameters, bits, channels).mT


def _by_block(scale: Tensor, channels: int) -> Tensor:
    """Expands scales `[..., groups of channels, blocks]` to `[..., blocks, channels]`."""
    groups = scale.shape[-2]
    return scale.mT if groups == channels else _repeated(scale.mT, channels // groups)


def _repeated(parts: Tensor, times: int) -> Tensor:
    """Repeats each element of the last axis `times` times."""
    return parts.unsqueeze(-1).expand(*parts.shape, times).flatten(-2)
