"""Attention of one layer over everything it holds: pages in packed form, the exact window, and the tokens just arrived.

    tokens of a row   0 ........ attended ........ packed keys ........ before ........ after
    keys              | packed pages ............................| key window  | this forward
    values            | packed pages   | value window .......................  | this forward

A row reads keys and values from pages up to `attended`. Beyond it the values are exact while a block of keys may
already be encoded (KIVI): those keys are met in their pages, too. Tiles and parts join in one running softmax. New
tokens are attended as they arrived: encoding comes after attention, so a prompt's own attention is exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from calib.kernels.attend.reference import RunningSoftmax
from calib.runtime.reading import Logits, Reading
from calib.runtime.rows import Forward, Rows
from calib.runtime.stream import Stream

# Query rows of a KV head that are scored at once: bounds the scores of a long chunk against a tile.
QUERY_ROWS = 1024


def attend(
    keys: Stream,
    values: Stream,
    state: Rows,
    forward: Forward,
    rows: range,
    logits: Logits,
    query: Tensor,
    new: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention for some rows of the batch, none of whose columns is padding.

    `query [rows, heads, n, D]`, the new keys and values `[rows, kv_heads, n, D]` -> `[rows, heads, n, D]` in the
    query's dtype.
    """
    length = query.shape[2]
    plain = logits.softcap is None and (logits.sliding is None or length <= logits.sliding)
    if plain and length > 1 and not any(forward.before[row] for row in rows):
        return F.scaled_dot_product_attention(query, *new, is_causal=True, scale=logits.scale, enable_gqa=True)
    step = max(1, QUERY_ROWS * new[0].shape[1] // query.shape[1])
    outputs = []
    for at in range(0, length, step):
        tile = query[:, :, at : at + step]
        windows = (keys.window.tokens.shape[2], values.window.tokens.shape[2])
        reading = Reading.of(state, forward, rows, range(at, at + tile.shape[2]), logits.sliding, windows, query.device)
        outputs.append(_attend_tile(keys, values, reading, logits, tile, new))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _attend_tile(
    keys: Stream, values: Stream, reading: Reading, logits: Logits, query: Tensor, new: tuple[Tensor, Tensor]
) -> Tensor:
    """The same for the queries of `reading` alone."""
    # Query rows of a KV head: group-major, then the tokens of the tile.
    grouped = (query.float() * logits.scale).unflatten(1, (new[0].shape[1], -1)).flatten(2, 3)
    folded, constant = keys.plan.transform.fold_query(grouped)
    here = slice(reading.rows.start, reading.rows.stop)
    softmax = RunningSoftmax()

    def packed(pages: Tensor | slice) -> Tensor:
        scores = keys.plan.codec.scores(folded, keys.pool.read(pages))
        return scores if constant is None else scores + constant

    def mix(weights: Tensor, pages: Tensor | slice) -> Tensor:
        mixed = values.plan.codec.mix(weights, values.pool.read(pages), values.head_dim)
        return values.plan.transform.fold_output(mixed, weights.sum(-1, keepdim=True))

    for pages, hidden in reading.tiles[:-1]:
        softmax.add(mix(softmax.weights(_logits(packed(pages), hidden, logits.softcap)), pages))

    # The last tile, the window and the new tokens are one part: most caches are no longer than that.
    parts, tile, slots = [], 0, 0
    recent = None if reading.recent is None else packed(reading.recent)
    if reading.tiles:
        tile = reading.last_tile_tokens
        parts.append(
            recent[..., :tile] if recent is not None and reading.recent_holds_tile else packed(reading.tiles[-1][0])
        )
    if reading.window is not None:
        slots = reading.window.shape[-1]
        exact = grouped @ keys.window.tokens[here].float().mT
        sources = exact if recent is None else torch.cat([exact, recent], -1)
        parts.append(sources.gather(-1, reading.window.expand(*sources.shape[:3], -1)))
    parts.append(grouped @ new[0][:, :, : reading.queries.stop].float().mT)
    weights = softmax.weights(_logits(torch.cat(parts, -1), reading.hidden, logits.softcap))
    of_tile, of_window, of_new = weights.split([tile, slots, reading.queries.stop], -1)
    softmax.add(of_new @ new[1][:, :, : reading.queries.stop].float())
    if slots:
        softmax.add(of_window @ values.window.tokens[here].float())
    if tile:
        softmax.add(mix(of_tile, reading.tiles[-1][0]))
    output: Tensor = softmax.output().unflatten(2, (-1, query.shape[2])).flatten(1, 2).to(query.dtype)
    return output


def _logits(scores: Tensor, hidden: Tensor | None, softcap: float | None) -> Tensor:
    """Soft cap, then -inf where `hidden [rows, 1, n or 1, tokens]`; query rows are group-major, so groups share the mask."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is None:
        return scores
    by_group = scores.unflatten(2, (-1, hidden.shape[2])) if hidden.shape[2] > 1 else scores.unsqueeze(3)
    return by_group.masked_fill(hidden.unsqueeze(2), -torch.inf).flatten(2, 3)
