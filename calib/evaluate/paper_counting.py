"""Sizes as the papers count them, which leave out what a cache holds besides: positions, pages, the exact window.

They are printed only under the label `paper counting`, beside the true bits. ZipCache: arXiv:2405.14256. MiKV:
arXiv:2402.18096. GEAR: arXiv:2403.05527. CSR: arXiv:2412.11741. SpeCache: arXiv:2503.16163. Widths: `width` is the channels
of all KV heads of a layer (hd in ZipCache's formulas, d in GEAR's), `batch` ZipCache's b, `length` the tokens (l, n).
Formulas count 16-bit parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ZIPCACHE_BATCH = 8  # of appendix A and of every ratio the paper prints
ZIPCACHE_TIER_PARAMETERS = 3  # numbers a channel: scale and zero point of the keys, channel scale of the values
GEAR_OUTLIER_NUMBERS = 3  # 16-bit numbers an outlier: its value and two indices
GEAR_METHODS = ("gear", "gear_l", "group_wise", "outlier_reduced", "uniform")


def group_ratio(bits: float, group: int) -> float:
    """16-bit size / size with groups of `group` numbers, 2 parameters each (ZipCache appendix A, eq. A; 3.200)."""
    return 16 / (bits + 2 * 16 / group)


def token_ratio(bits: float, width: int) -> float:
    """The same with 2 parameters a token over all heads, keys and values alike (eq. B; 3.992)."""
    return 16 / (bits + 2 * 16 / width)


def channel_separable_ratio(
    bits: float,
    width: int,
    length: int,
    batch: int = ZIPCACHE_BATCH,
    channel_parameters: int = ZIPCACHE_TIER_PARAMETERS,
) -> float:
    """The same for channelwise keys and channel-separable tokenwise values (eq. C; 3.995).

    Each of `width` channels holds `channel_parameters` numbers, once for the whole batch as the paper counts; each token
    has 2 for its values.
    """
    channels = channel_parameters * 16 / (2 * batch * length)  # bits a value
    tokens = 2 * 16 / (2 * width)
    return 16 / (bits + channels + tokens)


def zipcache_ratio(tiers: Sequence[tuple[float, float]], width: int, length: int, batch: int = ZIPCACHE_BATCH) -> float:
    """Eq. C for tiers of (bits, share), each with channel parameters of its own: 4 and 2 bits at 60 %, length 840: 4.98.

    For a single sequence (batch=1) it is 4.91. The paper prints no formula for two tiers.
    """
    mean = sum(bits * share for bits, share in tiers)
    return channel_separable_ratio(mean, width, length, batch, ZIPCACHE_TIER_PARAMETERS * len(tiers))


def mikv_size(ratio: float, important: int, retained: int, group: int) -> float:
    """Share of the 16-bit cache: r p/16 + (1 - r) n/16 + f 2/group, for importance ratio r, p and n bits.

    f is the share that is quantised: 1 - r where the important tier is 16-bit, else 1. The paper prints no formula; this
    one gives its table 3 (33, 23, 18, 16 %) with group 64 and table 2 (36 | 38 %, 33 %) with groups 128 | 64. Retained
    in 0 bits (evicted) only the important tier is left.
    """
    if retained == 0:
        quantised = 0.0 if important == 16 else ratio
    else:
        quantised = 1 - ratio if important == 16 else 1.0
    return ratio * important / 16 + (1 - ratio) * retained / 16 + quantised * 2 / group


def gear_ratio(bits: int, outliers: float, rank: float | int, width: int, length: float) -> float:
    """16-bit size / size of GEAR and its baselines: 1 / (b/16 + 3 s + rho (n + d) / max(n, d)) for n tokens, d channels.

    rank: a float is rho, the share of min(n, d), whose factors hold r (n + d) numbers of n d; an int is r itself. With
    rank 0 it is the formula of outlier-reduced quantisation (2.50 at s = 5 %), with s = 0 as well the 4 of the paper's
    uniform and group-wise rows at 4 bits. Scales and zero points are not counted, nor is the buffer. The printed 2.63
    (rho 5 %) and 3 (2 %) belong to n about 0.4 d, which the paper does not state.
    """
    factors = rank * min(length, width) if isinstance(rank, float) else min(rank, length, width)
    low_rank = factors * (length + width) / (length * width)
    return 1 / (bits / 16 + GEAR_OUTLIER_NUMBERS * outliers + low_rank)


def gear_bits(options: Mapping[str, Any], width: int, length: float) -> float | None:
    """Bits a value by `gear_ratio`: of the paper's form and, where nothing is kept besides codes, of its baselines.

    None for the released form and other backbones' corrections: the paper has no formula for them.
    """
    bits, outliers, rank = options["bits"] or 4, options["outliers"], options["rank"]
    if options["variant"] == "paper" and options["backbone"] in (None, "uniform"):
        return 16 / gear_ratio(bits, outliers, 0.02 if rank is None else rank, width, length)
    codes_alone = outliers == 0 and rank == 0 and not options["decode_rank"]
    return float(bits) if codes_alone and options["backbone"] in ("uniform", "channel") else None


def csr_bits(tiers: Sequence[tuple[int, float]], head_dim: int) -> float:
    """32 s / d a value ("Analysis for CSR"): an index and a coefficient of 16 bits each for s pairs of d channels.

    tiers: (s, share). CSR-4 is 1 bit at head_dim 128. Dictionaries, outliers and the exact window are not counted.
    """
    return sum(32 * pairs * share for pairs, share in tiers) / head_dim


def specache_size(bits: int, group: int, exact: int, length: float) -> float:
    """Share of the 16-bit cache on the device: (B + 32/g)/16 + exact/L, for a window of 64 tokens and 64 fetched ones 128/L.

    The paper prints no formula; this one gives all its sizes, with L the longest input: 4,096, 8,192 or 32,768 tokens. KIVI's
    rows have the same sizes there, for a window of 128. The copy on the host is not counted.
    """
    return (bits + 2 * 16 / group) / 16 + exact / length


def counted_bits(
    method: str, options: Mapping[str, Any], head_dim: int, width: int, prompt: float, length: float
) -> float | None:
    """Bits a value as the method's paper counts them; None where its paper gives no formula.

    options: all of the method's. prompt: tokens that fix its budgets; length: tokens in the cache. Eviction is counted as
    MiKV's table 1 does: what is kept, in 16 bits. Corrections over another method are counted by no paper, nor are options that
    differ from layer to layer.
    """
    if options.get("corrections") or "tuned" in options:
        return None
    if method in GEAR_METHODS:
        return gear_bits(options, width, length)
    if method == "csr":
        tiers = options["tiers"] or [(options["sparsity"] or 8, 1.0)]
        return csr_bits(tiers, head_dim) if options["coefficients"] == "fp16" else None
    if method == "specache":
        if options["low"] is not None:
            return None
        return 16 * specache_size(options["bits"], options["group"], options["residual"] + options["k"], length)
    if method == "zipcache":
        ratio = options["ratio"]
        tiers = [(bits, share) for bits, share in options["tiers"]]
        if ratio is not None:
            tiers = [(tiers[0][0], ratio), (tiers[1][0], 1 - ratio)]
        if not all(1 <= bits <= 8 for bits, _ in tiers):
            return None
        return 16 / zipcache_ratio(tiers, width, round(length))
    if method == "mikv":
        kept = share(options["budget"], length) if options["budget"] else options["ratio"] * prompt / length
        group = options["group"] or head_dim // 2
        return 16 * mikv_size(min(1.0, kept), options["important"], options["retained"], group)
    if method == "h2o":
        kept = sum(share(options[part], length, prompt) for part in ("heavy", "recent"))
    elif method == "streaming_llm":
        kept = share(options["sinks"] + options["window"], length)
    elif method == "oracle":
        kept = options["ratio"]
    else:
        return None
    return 16 * min(1.0, kept)


def share(budget: float, length: float, prompt: float | None = None) -> float:
    """The share of `length` tokens that a budget of tokens (int), or of a share of the prompt (float), keeps."""
    tokens = budget * prompt if isinstance(budget, float) and prompt is not None else budget
    return tokens / length
