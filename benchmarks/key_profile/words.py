"""What a profile of keys and attention says in words: each sentence is chosen by its numbers and claims no more."""

from benchmarks.key_profile.profile import LEAST_SEEN, LayerProfile

FURTHER = 1.5  # times the values' largest channel, before keys are said to have outlier channels of their own
MANY_MEDIANS = 10.0
SINK = 10  # even shares
MOST = 0.6  # of the attention, in the top 5 %
LOWER = 0.9  # of the rank after RoPE


def outlier_words(layers: list[LayerProfile]) -> str:
    """Channels of keys beside those of values, and how far out the furthest lies."""
    further = sum(p.keys.largest > FURTHER * p.values.largest for p in layers)
    furthest = max(max(p.keys.largest, p.before.largest if p.before else 0) for p in layers)
    words = (
        f"**Outlier channels.** In {further} of {len(layers)} layers the largest key channel after RoPE, relative to the median, "
        f"is more than {FURTHER} times the largest value channel"
    )
    stands = (
        "; these layers represent models whose keys, unlike their values, have outlier channels"
        if further
        else ": the model does not represent models whose keys, unlike their values, have outlier channels"
    )
    limit = (
        f". The largest channel is {furthest:.1f} times the median, so the model does not represent larger outliers."
        if furthest < MANY_MEDIANS
        else f". The largest channel is {furthest:.1f} times the median."
    )
    return words + stands + limit


def sink_words(layers: list[LayerProfile], tokens: int) -> str:
    """How much more than an even share of the attention the first token gets."""
    even = sum(1 / seen for seen in range(LEAST_SEEN, tokens + 1)) / (tokens - LEAST_SEEN + 1)
    sinks = [p.layer for p in layers if p.sink > SINK * even]
    words = f"**Attention sinks.** If attention were spread evenly, a token would get {even:.1%} of it. "
    if sinks:
        return words + (
            f"The first token gets more than {SINK} times that in layer{'s' * (len(sinks) > 1)} "
            f"{', '.join(map(str, sinks))}: a method that evicts it changes the outputs of these layers."
        )
    return (
        words
        + f"No layer gives the first token {SINK} times that: the model does not represent models with attention sinks."
    )


def mass_words(layers: list[LayerProfile]) -> str:
    """Whether few tokens carry the attention."""
    few = [p.layer for p in layers if p.top[1] >= MOST]
    words = (
        f"**Concentration.** The top 5 % of tokens get {MOST:.0%} of the attention or more in {len(few)} of {len(layers)} "
        "layers"
    )
    if len(few) == len(layers):
        return f"{words}: the model represents sparse attention, and cannot show what eviction costs where attention is spread."
    if few:
        return f"{words}: the model has both sparse attention and spread attention."
    return f"{words}: the model does not represent models with sparse attention."


def rank_words(layers: list[LayerProfile]) -> str:
    """Whether keys lie in fewer directions before RoPE."""
    after = [p.keys.rank / p.head_dim for p in layers]
    before = [p.before.rank / p.head_dim for p in layers if p.before]
    words = f"**Rank.** The effective rank of the keys after RoPE is {min(after):.0%} to {max(after):.0%} of head_dim"
    if not before:
        return f"{words}; this model has no separate key projection, so keys before RoPE are not shown."
    lower = sum(b < LOWER * a for b, a in zip(before, after, strict=True))
    return (
        f"{words}, before RoPE {min(before):.0%} to {max(before):.0%}. Before RoPE it is lower by more than a tenth in {lower} of "
        f"{len(layers)} layers" + (": their keys need fewer directions before RoPE than after it." if lower else ".")
    )
