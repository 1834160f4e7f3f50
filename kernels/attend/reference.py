"""Attention over packed tokens in plain torch, tile by tile.

Nothing here decodes a cache: a tile's codes become float32 integers, the query (for keys) or the weights (for values)
carries the scales, or where groups divide both axes the codes of that one tile do, and tiles meet in one running softmax.
Shapes: any leading dimensions, then `[kv_heads, rows, ...]`, where `rows` are the query rows of a KV head (group x new
tokens). A tile has its **tokens last**: words `[..., W, T]`, parameters `[..., 2 D/g_c, T/g_t]`, scales first; see
`kernels/pack` for why.
"""

from dataclasses import replace

import torch
from torch import Tensor

from calib.kernels.attend.packed_pages import Attended, CodeFold, PredictedValues
from calib.kernels.pack.heads import spread_heads
from calib.kernels.pack.reference import Widths, planes, unpack_columns


def scaled(query: Tensor, scale: float) -> Tensor:
    """Query rows float32, times the scale of their scores."""
    return query.float() if scale == 1 else query.float() * scale


def code_scores(query: Tensor, words: Tensor, bits: int | Widths) -> Tensor:
    """q.c, a code being its number: `query [..., rows, D]` float32 against a tile's words -> `[..., rows, T]` float32.

    Scale and zero point are the caller's, as is the plane form (`kernels/pack/heads.py`), in which D is P * Wm.
    """
    return query @ unpack_columns(words, bits, query.shape[-1]).float()


def code_mix(weights: Tensor, words: Tensor, bits: int | Widths, channels: int) -> Tensor:
    """sum_t p_t c_t: `weights [..., rows, T]` float32 and a tile's words -> `[..., rows, D]` float32."""
    return weights @ unpack_columns(words, bits, channels).float().mT


def keys_of_codes(
    words: Tensor, bits: int | Widths, counts: tuple[int, ...], matrix: Tensor, sizes: Tensor | None = None
) -> Tensor:
    """`matrix [kv_heads, D, n + 1]` times the codes of a tile and a 1 behind them, of sizes s times s c, s and 1: float32
    `[..., kv_heads, D, tokens]`. Words and `counts` as in `kernels/pack/heads.py`; `sizes [..., kv_heads, 1, tokens]`."""
    codes = unpack_columns(spread_heads(words, counts), bits, planes(bits) * max(counts))
    return keys_of_numbers(codes, matrix, sizes)


def keys_of_numbers(codes: Tensor, matrix: Tensor, sizes: Tensor | None = None) -> Tensor:
    """The same of unpacked `codes [..., kv_heads, components, tokens]`."""
    *lead, components, tokens = codes.shape
    numbers = torch.empty(*lead, matrix.shape[-1], tokens, device=codes.device)
    if sizes is None:
        numbers[..., :components, :].copy_(codes)
    else:
        torch.mul(codes, sizes, out=numbers[..., :components, :])
        numbers[..., components:-1, :].copy_(sizes)
    numbers[..., -1, :].fill_(1)
    return matrix @ numbers


def rotated_scores(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`query [..., rows, D]` times `keys [..., D, tokens]` moved forward by the positions of `cos` and `sin [..., r/2, tokens]`:
    `[..., rows, tokens]`. Of the keys the second half is overwritten: with each half in a tensor of its own, a tile is passed over
    four times where putting both back takes five."""
    half = cos.shape[-2]
    first, second, rest = keys[..., :half, :], keys[..., half : 2 * half, :], keys[..., 2 * half :, :]
    moved = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    found = query[..., :half] @ moved
    found += query[..., half : 2 * half] @ second
    return found + query[..., 2 * half :] @ rest if rest.shape[-2] else found


def folded(fold: CodeFold, mixed: Tensor, mass: Tensor, sized_mass: Tensor, mixed_keys: Tensor | None = None) -> Tensor:
    """sum p v of values whose codes are `mixed [..., rows, N]`, `mass` sum p; of tokens with sizes s sum p s c, and `sized_mass`
    sum p s `[..., rows, 1]`. With `mixed_keys` as `predicted_mixture` has them, what is predicted is added."""
    offset = fold.origin * mass
    if fold.mean is not None:
        offset = torch.addcmul(fold.mean * mass, fold.origin - fold.mean, sized_mass)
    offset.addcmul_(mixed @ fold.axes.float(), fold.size)
    if fold.predicted is None or mixed_keys is None:
        return offset
    return offset.add_(predicted_mixture(fold.predicted, mixed_keys))


def predicted_mixture(predicted: PredictedValues, mixed_keys: Tensor) -> Tensor:
    """What is predicted of sum p v, from sum p s c of the keys' codes and behind them sum p s, `[..., rows, N + 1]`."""
    numbers = 2 * mixed_keys[..., :-1] - predicted.largest * mixed_keys[..., -1:]
    return (numbers @ predicted.table.float()).mul_(predicted.unit)


def scaled_codes(words: Tensor, parameters: Tensor, bits: int, channels: int) -> Tensor:
    """x^ = c s + z of a tile, float32 `[..., D, T]`; `parameters` float32, one s and z for each group of channels x tokens."""
    codes = unpack_columns(words, bits, channels).float()
    columns, blocks = parameters.shape[-2] // 2, parameters.shape[-1]
    grouped = codes.unflatten(-1, (blocks, -1)).unflatten(-3, (columns, -1))
    scale, zero = parameters.unflatten(-2, (2, columns, 1)).unsqueeze(-1).unbind(-5)
    torch.addcmul(zero, grouped, scale, out=grouped)
    return codes


def whole(part: Attended) -> Attended:
    """A part whose runs, if it has several, are joined."""
    if part.top.ndim == 4:
        return part
    top = part.top.amax(2)
    shares = torch.exp(part.top - top.unsqueeze(2))
    return replace(part, top=top, mass=(part.mass * shares).sum(2), mixed=(part.mixed * shares).sum(2))


class RunningSoftmax:
    """Softmax attention accumulated part by part; the merge of all tiles and the exact window.

    `top` and `mass` are `[..., rows, 1]`, `mixed` `[..., rows, D]`, float32: mixed / mass is the output so far and
    top + log(mass) the log-sum-exp. `mass` None: the weights were already normalised.
    """

    def __init__(self) -> None:
        self.top: Tensor | None = None
        self.mass: Tensor | None = None
        self.mixed: Tensor | None = None
        self._waiting: list[Attended] = []
        self._normaliser: Tensor | None = None

    def weights(self, scores: Tensor) -> Tensor:
        """Takes a part's `scores [..., rows, T]` (masked ones -inf), rescales what is there, returns the part's weights."""
        self._settle()
        # A row that has met only masked tokens has no maximum; a finite stand-in makes its weights 0 instead of NaN.
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
        """Takes a part that was attended elsewhere. It waits: where all that follows is attended elsewhere as well, nothing is
        rescaled here (`parts`)."""
        self._waiting.append(part)

    def parts(self) -> list[Attended]:
        """What was taken so far, for who attends the rest."""
        if self.top is None or self.mass is None or self.mixed is None:
            return self._waiting
        return [Attended(self.top, self.mass, self.mixed, None), *self._waiting]

    def settled(self) -> Attended:
        """What was taken so far as one part."""
        self._settle()
        if self.top is None or self.mass is None or self.mixed is None:
            raise ValueError("nothing was attended")
        return Attended(self.top, self.mass, self.mixed, None)

    def _settle(self) -> None:
        """Joins the parts that wait."""
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
        """`weights` of the last part, which has no masked row; the only part of a short cache is plain softmax."""
        return self.weights(scores) if self.top is not None or self._waiting else scores.softmax(-1)

    def add(self, mixed: Tensor) -> None:
        """Adds the part's weighted values `[..., rows, D]`."""
        self.mixed = mixed if self.mixed is None else self.mixed + mixed

    def probabilities(self, scores: Tensor) -> Tensor:
        """The final probabilities of a part's `scores`, once every part was taken."""
        return (scores - self.normaliser()).exp_()

    def end(self, normaliser: Tensor) -> None:
        """Every part was taken, the last ones elsewhere, which found the log-sum-exp."""
        self._normaliser = normaliser

    def normaliser(self) -> Tensor:
        """log-sum-exp of each row `[..., rows, 1]`, once every part was taken."""
        if self._normaliser is not None:
            return self._normaliser
        self._settle()
        if self.top is None or self.mass is None:
            raise ValueError("nothing was attended")
        return self.top + self.mass.log()

    def output(self) -> Tensor:
        """Attention output `[..., rows, D]`; 0 for a row that met no token at all (padding)."""
        self._settle()
        if self.mixed is None:
            raise ValueError("nothing was attended")
        return self.mixed if self.mass is None else self.mixed / self.mass.clamp_min(torch.finfo(torch.float32).tiny)
