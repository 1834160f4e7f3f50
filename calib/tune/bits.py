"""Bits per value of a candidate's encoded tokens, as the runtime counts them: codes, parameters, indices, positions.

In general these are the bits of one more token (`Memory.marginal_bits`). Two kinds of methods spend different bits on a prompt and
on later tokens: methods whose number of important tokens is fixed by the prompt, and methods that encode segments, where the prompt
is one segment and each later block another. For them the result is the larger of marginal bits and bits in the prompts' pages.
"""

from calib.evaluate.stored import page_bits
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.tiered.store import TieredStore
from calib.runtime.tiered.tier import POSITIONS


def bits_per_value(store: OrderedStore | TieredStore, told: bool) -> float:
    """Returns the bits per value of the encoded tokens in `store`.

    `told` says that the store records positions only for this measurement; then they are not counted.
    """
    weight = store.footprint()
    marginal = 8 * weight.marginal
    if isinstance(store, OrderedStore):
        return marginal / weight.values
    positions = [8 * tier.pool.fields[POSITIONS].row_bytes(store.heads) if told else 0 for tier in store.tiers]
    marginal -= sum(share * size for share, size in zip(store.growth(), positions, strict=False))
    if not store.plan.differs_in_prompt:
        return marginal / weight.values
    prompt = tokens = 0.0
    for row, length in enumerate(store.sequences.lengths):
        prompt += sum(page_bits(store, row).values())
        prompt -= sum(count * size for count, size in zip(store.counts(row), positions, strict=True))
        tokens += length - store.sequences.exact(row, length)
    return max(marginal, prompt / tokens if tokens else 0.0) / weight.values
