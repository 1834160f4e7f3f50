"""Attention over packed tokens in plain torch, tile by tile, with a running softmax over all tiles.

The cache is never decoded as a whole: the codes of a tile become float32 integers, and scales are multiplied into the query (for
keys) or the weights (for values); where groups divide both axes, into the codes of that tile.
Shapes: any leading dimensions, then `[kv_heads, rows, ...]`, where `rows` are the query rows of a KV head (group x new tokens). A
tile of T tokens has its **tokens last** (README.md of `kernels/pack` says why): words `[..., W, T]`, parameters `[..., 2 D/g_c,
T/g_t]` for groups of g_t tokens x g_c channels, scales before zero points.
"""

from dataclasses import replace

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import Attended, CodeFold, PredictedValues
from calib.kernels.pack.heads import spread_heads
from calib.kernels.pack.reference import Widths, planes, unpack_columns


def scaled(query: Tensor, scale: float) -> Tensor:
    """Query rows in float32, times the softmax scale."""
    return query.float() if scale == 1 else query.float() * scale


def code_scores(query: Tensor, words: Tensor, bits: int | Widths) -> Tensor:
    """Scores with integer codes, q.c: `query [..., rows, D]` float32 and a tile's words -> `[..., rows, T]` float32.

    The caller applies scale and zero point. For heads with different numbers of words it passes the query in plane form, where D is
    P * Wm (`kernels/pack/heads.py`).
    """
    return query @ unpack_columns(words, bits, query.shape[-1]).float()


def code_mix(weights: Tensor, words: Tensor, bits: int | Widths, channels: int) -> Tensor:
    """Mixture of integer codes, sum_t p_t c_t: `weights [..., rows, T]` float32 and a tile's words -> `[..., rows, D]` float32."""
    return weights @ unpack_columns(words, bits, channels).float().mT


def keys_of_codes(
    words: Tensor, bits: int | Widths, counts: tuple[int, ...], matrix: Tensor, sizes: Tensor | None = None
) -> Tensor:
    """Rebuilds a tile of keys from codes c of components: `matrix` times the column (c, 1) of each token, or with `sizes` s times
    (s c, s, 1). `matrix [kv_heads, D, n + 1]`, or n + 2 columns with `sizes [..., kv_heads, 1, tokens]`, for n components. Words
    and `counts` as in `kernels/pack/heads.py`. Returns float32 `[..., kv_heads, D, tokens]`."""
    codes = unpack_columns(spread_heads(words, counts), bits, planes(bits) * max(counts))
    return keys_of_numbers(codes, matrix, sizes)


def keys_of_numbers(codes: Tensor, matrix: Tensor, sizes: Tensor | None) -> Tensor:
    """`keys_of_codes` for unpacked `codes [..., kv_heads, components, tokens]`."""
    *lead, components, tokens = codes.shape
    numbers = torch.empty(*lead, matrix.shape[-1], tokens, dtype=torch.float32, device=codes.device)
    if sizes is None:
        numbers[..., :components, :].copy_(codes)
    else:
        torch.mul(codes, sizes, out=numbers[..., :components, :])
        numbers[..., components:-1, :].copy_(sizes)
    numbers[..., -1, :].fill_(1)
    return matrix @ numbers


def rotated_scores(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Scores of `query [..., rows, D]` with `keys [..., D, tokens]` rotated by half-split RoPE, given by `cos` and `sin [..., r/2,
    tokens]`: `[..., rows, tokens]`. The second half of the rotated channels of `keys` is overwritten: with the halves in separate
    tensors a tile is read or written four times, not five."""
    half = cos.shape[-2]
    first, second, rest = keys[..., :half, :], keys[..., half : 2 * half, :], keys[..., 2 * half :, :]
    moved = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    found = query[..., :half] @ moved
    found += query[..., half : 2 * half] @ second
    return found + query[..., 2 * half :] @ rest if rest.shape[-2] else found


def folded(fold: CodeFold, mixed: Tensor, mass: Tensor, sized_mass: Tensor, mixed_keys: Tensor | None = None) -> Tensor:
    """Maps a mixture of component codes to value channels (`CodeFold`): sum p v, `[..., rows, D]`.

    `mixed [..., rows, N]` is sum p c, or for tokens with sizes s sum p s c; `mass` is sum p and `sized_mass` sum p s, `[..., rows,
    1]`. With `mixed_keys` the `predicted_mixture` is added."""
    offset = fold.origin * mass
    if fold.mean is not None:
        offset = torch.addcmul(fold.mean * mass, fold.origin - fold.mean, sized_mass)
    offset.addcmul_(mixed @ fold.axes.float(), fold.size)
    if fold.predicted is None or mixed_keys is None:
        return offset
    return offset.add_(predicted_mixture(fold.predicted, mixed_keys))


def predicted_mixture(predicted: PredictedValues, mixed_keys: Tensor) -> Tensor:
    """Prediction of sum p v from `mixed_keys [..., rows, N + 1]`: sum p s c of the keys' N codes, then sum p s."""
    numbers = 2 * mixed_keys[..., :-1] - predicted.largest * mixed_keys[..., -1:]
    return (numbers @ predicted.table.float()).mul_(predicted.unit)


def scaled_codes(words: Tensor, parameters: Tensor, bits: int, channels: int) -> Tensor:
    """Decodes a tile: x^ = c s + z, float32 `[..., D, T]`; float32 `parameters` of groups of channels x tokens."""
    codes = unpack_columns(words, bits, channels).float()
    columns, blocks = parameters.shape[-2] // 2, parameters.shape[-1]
    grouped = codes.unflatten(-1, (blocks, -1)).unflatten(-3, (columns, -1))
    scale, zero = parameters.unflatten(-2, (2, columns, 1)).unsqueeze(-1).unbind(-5)
    torch.addcmul(zero, grouped, scale, out=grouped)
    return codes


def whole(part: Attended) -> Attended:
    """Merges the runs of a part, if it has several."""
    if part.top.ndim == 4:
        return part
    top = part.top.amax(2)
    shares = torch.exp(part.top - top.unsqueeze(2))
    return replace(part, top=top, mass=(part.mass * shares).sum(2), mixed=(part.mixed * shares).sum(2))


class RunningSoftmax:
    """Online softmax: attention accumulated over parts (tiles, fused kernels, the exact window).

    `top` (largest score) and `mass` are `[..., rows, 1]`, `mixed` is `[..., rows, D]`, float32: mixed / mass is the output so far
    and top + log(mass) the log-sum-exp. `mass` is None if the only part's weights were already normalised.
    """

    def __init__(self) -> None:
        self.top: Tensor | None = None
        self.mass: Tensor | None = None
        self.mixed: Tensor | None = None
        self._waiting: list[Attended] = []
        self._normaliser: Tensor | None = None

    def weights(self, scores: Tensor) -> Tensor:
        """Adds a part's `scores [..., rows, T]` (-inf if masked) to `top` and `mass`, rescales `mixed`, returns the part's
        weights."""
        self._settle()
        # A row with masked tokens only has a maximum of -inf; a finite one makes its weights 0 instead of NaN.
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        if self.top is not None:
            top = torch.maximum(self.top, top)
        weights = (scores - top).exp_()
        mass = weights.sum(-1, keepdim=True)
        if self.top is not None and self.mass is not None and self.mixed is not None:
            keep = torch.exp(self.top - top)
            mass += self.mass * keep
            self.mixed = self.mixed * keep
        self.top, self.mass = top, mass
        return weights

    def join(self, part: Attended) -> None:
        """Adds a part that a kernel has computed. It is merged only when needed: if all later parts come from kernels too, the last
        kernel merges them (`parts`)."""
        self._waiting.append(part)

    def parts(self) -> list[Attended]:
        """All parts so far, unmerged, for a kernel that attends the remaining tokens and merges."""
        if self.top is None or self.mass is None or self.mixed is None:
            return self._waiting
        return [Attended(self.top, self.mass, self.mixed, None), *self._waiting]

    def settled(self) -> Attended:
        """All parts so far, merged into one. Raises ValueError if there are none."""
        self._settle()
        if self.top is None or self.mass is None or self.mixed is None:
            raise ValueError("nothing was attended")
        return Attended(self.top, self.mass, self.mixed, None)

    def _settle(self) -> None:
        """Merges the parts that were added by `join`."""
        while self._waiting:
            part = whole(self._waiting.pop(0))
            if self.top is None or self.mass is None or self.mixed is None:
                self.top, self.mass, self.mixed = part.top, part.mass, part.mixed
                continue
            highest = torch.maximum(self.top, part.top)
            stays, comes = torch.exp(self.top - highest), torch.exp(part.top - highest)
            self.top = highest
            self.mass, self.mixed = self.mass * stays + part.mass * comes, self.mixed * stays + part.mixed * comes

    def last_weights(self, scores: Tensor) -> Tensor:
        """`weights` for the last part, which must have an unmasked token in every row. If it is the only part, its softmax."""
        return self.weights(scores) if self.top is not None or self._waiting else scores.softmax(-1)

    def add(self, mixed: Tensor) -> None:
        """Adds a part's weighted sum of values, `[..., rows, D]`."""
        self.mixed = mixed if self.mixed is None else self.mixed + mixed

    def probabilities(self, scores: Tensor) -> Tensor:
        """Final attention probabilities of a part's `scores`; call it after all parts were added."""
        return (scores - self.normaliser()).exp_()

    def end(self, normaliser: Tensor) -> None:
        """Sets the final log-sum-exp, where a kernel has attended the last parts and computed it."""
        self._normaliser = normaliser

    def normaliser(self) -> Tensor:
        """Log-sum-exp of each row over all parts, `[..., rows, 1]`. Raises ValueError if there are none."""
        if self._normaliser is not None:
            return self._normaliser
        self._settle()
        if self.top is None or self.mass is None:
            raise ValueError("nothing was attended")
        return self.top + self.mass.log()

    def output(self) -> Tensor:
        """Attention output `[..., rows, D]`; 0 for a row without any unmasked token (padding). Raises ValueError without parts."""
        self._settle()
        if self.mixed is None:
            raise ValueError("nothing was attended")
        return self.mixed if self.mass is None else self.mixed / self.mass.clamp_min(torch.finfo(torch.float32).tiny)
