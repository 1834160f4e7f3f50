"""Several rows of an importance method, each beside an oracle of its own: rows that become copies of others, and drafts."""

import copy
from collections.abc import Sequence

import torch
from importance.layer import LayerOracle
from importance.scenarios import CLEAR, OUTPUT, Scenario, check_stored, computing, oracles_of
from layer_walk import Tokens, feed
from tolerances import ATTENTION
from walk_steps import Step

from calib.runtime import compress
from calib.runtime.cache import CompressedCache

OUTPUTS = ATTENTION | {torch.float32: OUTPUT}


def rows_beside(scenario: Scenario, steps: Sequence[Step]) -> None:
    """Run a cache and the oracles of its rows through the same steps; assert after each that outputs and tiers agree.

    Rejected drafts are attended, and nothing of them is stored: they are given to a copy of the oracle alone.
    """
    model = scenario.model()
    cache = compress(model, scenario.method, **scenario.options)
    cache.release()
    rows = [oracles_of(scenario, model) for _ in steps[0].sizes]
    for number, step in enumerate(steps):
        if step.rows:
            replace_rows(cache, step.rows)
            rows = [copy.deepcopy(rows[source]) for source in step.rows]
            continue
        rejected, columns = step.rejected or 0, max(step.sizes) + (len(set(step.sizes)) > 1)
        seed = 1000 * scenario.tokens + 10 * number
        new = [Tokens.random(model, size + rejected, seed + row) for row, size in enumerate(step.sizes)]
        cache.sequences.recording = step.rejected is not None
        with computing(scenario):
            outputs = feed(cache, new, columns=columns + rejected)
        met = copy.deepcopy(rows) if rejected else rows
        attend_beside(met, new, outputs, scenario.dtype, number)
        if step.rejected is not None:
            cache.crop(-rejected)
        if rejected:
            accepted = [tokens[: len(tokens) - rejected] for tokens in new]
            attend_beside(rows, accepted, None, scenario.dtype, number)
        for row, layers in enumerate(rows):
            for layer, held in zip(layers, cache.compressed, strict=True):
                assert layer.margin > CLEAR, f"selections {layer.margin} apart, take other tokens"
                check_stored(held.store, layer, row)


def attend_beside(
    rows: list[list[LayerOracle]],
    new: list[Tokens],
    outputs: list[list[torch.Tensor]] | None,
    dtype: torch.dtype,
    number: int,
) -> None:
    """Give each row's `new` tokens to its oracles; assert that their outputs are the cache's, `[layer][row]`, if given."""
    for row, (layers, tokens) in enumerate(zip(rows, new, strict=True)):
        for at, layer in enumerate(layers if len(tokens) else ()):
            given = (part[at].double().numpy() for part in (tokens.queries, tokens.keys, tokens.values))
            expected = layer.forward(*given)
            if outputs is not None:
                error = abs(outputs[at][row].double().numpy() - expected).max() / abs(expected).max()
                assert error <= OUTPUTS[dtype], f"step {number}, row {row}, layer {at}: output off by {error:.2g}"


def replace_rows(cache: CompressedCache, sources: tuple[int, ...]) -> None:
    """Row i becomes a copy of row `sources[i]`, by the function of the cache that transformers calls for such sources."""
    held = len(cache.sequences.lengths)
    repeats = len(sources) // held
    if repeats > 1 and sources == tuple(row for row in range(held) for _ in range(repeats)):
        cache.batch_repeat_interleave(repeats)
    elif len(sources) == held:
        cache.reorder_cache(torch.tensor(sources))
    else:
        cache.batch_select_indices(torch.tensor(sources))
