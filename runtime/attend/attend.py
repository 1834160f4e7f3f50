"""Attention of one layer over everything it holds: one loop over spans of scored tokens, one running softmax over them all.

    store.attend -> attend: for each tile of query columns a ReadPlan
    ReadPlan -> spans: packed pages, fetched tokens, the exact window, the new tokens
    span -> weights -> mixture of values; at the end corrections and statistics that need final probabilities

New tokens are attended exactly: they are encoded after attention, so a prompt's own attention is exact.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from calib.kernels.attend.operation import Attended, attend_exact
from calib.kernels.attend.reference import RunningSoftmax
from calib.runtime.attend.attention_stats import AttentionStats, Observed
from calib.runtime.attend.fetched_tokens import FetchedTokens, newest
from calib.runtime.attend.grouped_query import GroupedQuery
from calib.runtime.attend.layer_tokens import LayerTokens
from calib.runtime.attend.scored_span import ExactSpan, ScoredSpan

# Query rows (group-major) of a KV head that are scored at once: bounds the scores of a long chunk against a tile.
QUERY_ROWS = 1024


def attend(held: LayerTokens) -> Tensor:
    """Attention over all held and new tokens; no query column is padding.

    `query [rows, heads, n, D]`, new tokens `[rows, kv_heads, n, D]` -> `[rows, heads, n, D]` in the query's dtype.
    """
    return _attend(held, None)[0]


def attend_observed(held: LayerTokens, observed: Observed) -> tuple[Tensor, AttentionStats | None]:
    """The same as `attend`, and the attention mass that the `observed` tokens got; None where it was added to the store at once."""
    return _attend(held, observed)


def _attend(held: LayerTokens, observed: Observed | None) -> tuple[Tensor, AttentionStats | None]:
    query, new_keys, new_values = held.request.given
    heads, kv_heads, length = query.shape[1], new_keys.shape[1], query.shape[2]
    step = 1 if length == 1 else held.columns_at_once(heads, max(1, QUERY_ROWS * kv_heads // heads))
    outputs, stats = [], None
    for at in range(0, length, step):
        tile = query[:, :, at : at + step] if length > step else query
        queries = range(at, at + tile.shape[2])
        # Query rows of a KV head: group-major, then the tokens of the tile.
        by_head = tile.reshape(query.shape[0], kv_heads, heads // kv_heads * len(queries), query.shape[3])
        grouped = GroupedQuery(by_head.contiguous(), held.logits.scale)
        plan = held.plan(queries, grouped.given.shape[2])
        softmax, asked, exact = RunningSoftmax(), list[ScoredSpan](), None
        for span in held.spans(grouped, plan, new_keys, new_values, observed):
            if isinstance(span, ExactSpan):
                exact = _with_exact(span, grouped, held, softmax, asked)
                break
            if span.is_asked:
                asked.append(span)
            if isinstance(span.mix, Attended):
                softmax.join(span.mix)
                continue
            assert span.mix is not None
            # Plain softmax if this is the only span; spans in `asked` need the normaliser afterwards.
            last = span.is_last and not asked
            weights = softmax.last_weights(span.scores) if last else softmax.weights(span.scores)
            for part in span.mix(weights):
                softmax.add(part)
        mixed = softmax.output() if exact is None else exact
        if asked:
            mixed = _corrected(mixed, asked, softmax)
            _add_mass(held.fetched, asked, softmax, heads // kv_heads)
        if observed is not None:
            with torch.no_grad():
                seen = AttentionStats.of(observed, asked, softmax.normaliser(), plan, queries)
                stats = seen if stats is None or seen is None else stats.plus(seen, plan.new)
        mixed = mixed if mixed.dtype == query.dtype else mixed.to(query.dtype)
        outputs.append(mixed.reshape(query.shape[0], heads, len(queries), mixed.shape[3]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), stats


def _with_exact(
    span: ExactSpan, query: GroupedQuery, held: LayerTokens, softmax: RunningSoftmax, asked: list[ScoredSpan]
) -> Tensor:
    """The output over all spans, by the kernel for exact tokens, which merges the others. Where probabilities are needed, the
    kernel also returns scores and normaliser."""
    told = bool(asked) or span.is_asked
    corrected = told and any(one.left is not None for one in asked)
    given, scale = query.for_kernels
    found = attend_exact(
        given, span.tokens, softmax.parts(), held.logits.softcap, scale, told, torch.float32 if corrected else None
    )
    if found.normaliser is not None and found.scores is not None:
        softmax.end(found.normaliser)
        asked += span.scored(found.scores)
    return found.output


def _corrected(mixed: Tensor, spans: list[ScoredSpan], softmax: RunningSoftmax) -> Tensor:
    """`mixed` plus what corrections add from the final probabilities, for all spans of a tier together."""
    left: dict[Callable[[Tensor], Tensor], list[Tensor]] = {}
    for span in spans:
        if span.left is not None:
            left.setdefault(span.left, []).append(span.scores)
    for added, scores in left.items():
        mixed = mixed + added(softmax.probabilities(torch.cat(scores, -1)))
    return mixed


def _add_mass(fetched: FetchedTokens | None, spans: list[ScoredSpan], softmax: RunningSoftmax, group: int) -> None:
    """Adds up the newest query's probabilities by position, for the policy that chooses which tokens to fetch."""
    if fetched is None or not fetched.asks:
        return
    fetched.take([span for span in spans if span.positions is not None], newest(softmax.normaliser(), group))
