"""Sizes as the papers count them, without what a cache holds besides: positions, pages, the exact window.

A method's `paper_bits` uses the formula of its paper; `calib eval` prints it only under the label `paper counting`, beside the
true bits. ZipCache: arXiv:2405.14256. MiKV: arXiv:2402.18096. GEAR: arXiv:2403.05527. CSR: arXiv:2412.11741. SpeCache:
arXiv:2503.16163. Symbols: `width` is the number of channels of all KV heads of a layer (hd in ZipCache's formulas, d in GEAR's),
`batch` is ZipCache's b, `length` the number of tokens (l, n). Scales, zero points and other parameters are counted as 16 bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

ZIPCACHE_BATCH = 8  # of appendix A and of every ratio the paper prints
ZIPCACHE_TIER_PARAMETERS = 3  # numbers a channel: scale and zero point of the keys, channel scale of the values
GEAR_OUTLIER_NUMBERS = 3  # 16-bit numbers an outlier: its value and two indices


class CountedCache(NamedTuple):
    """The sizes of one sequence's cache that the papers' formulas use.

    Attributes:
        head_dim: channels of a head.
        width: channels of all KV heads of a layer.
        prompt: tokens of the prompt, which fixes budgets.
        length: tokens seen in all.
    """

    head_dim: int
    width: int
    prompt: float
    length: float


def group_ratio(bits: float, group: int) -> float:
    """16-bit size / size with groups of `group` numbers, 2 parameters each (ZipCache appendix A, eq. A; 3.200)."""
    return 16 / (bits + 2 * 16 / group)


def token_ratio(bits: float, width: int) -> float:
    """16-bit size / size with 2 parameters a token over all heads, for keys and values alike (eq. B; 3.992)."""
    return 16 / (bits + 2 * 16 / width)


def channel_separable_ratio(
    bits: float,
    width: int,
    length: int,
    batch: int = ZIPCACHE_BATCH,
    channel_parameters: int = ZIPCACHE_TIER_PARAMETERS,
) -> float:
    """16-bit size / size for channelwise keys and channel-separable tokenwise values (eq. C; 3.995).

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
    """Share of the 16-bit cache: r p/16 + (1 - r) n/16 + f 2/group; r importance ratio, p important bits, n retained bits.

    f is the share that is quantised: 1 - r where the important tier is 16-bit, else 1. The paper prints no formula; this
    one gives its table 3 (33, 23, 18, 16 %) with group 64 and table 2 (36 | 38 %, 33 %) with groups 128 | 64. With n = 0
    (eviction) only the important tier is counted.
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


def csr_bits(tiers: Sequence[tuple[float, float]], head_dim: int) -> float:
    """32 s / d a value ("Analysis for CSR"): an index and a coefficient of 16 bits each for s pairs of d channels.

    tiers: (s, share), s being the mean of keys and values. CSR-4 is 1 bit at head_dim 128. Dictionaries, outliers and the exact
    window are not counted.
    """
    return sum(32 * pairs * share for pairs, share in tiers) / head_dim


def specache_size(bits: int, group: int, exact: int, length: float) -> float:
    """Share of the 16-bit cache on the device: (B + 32/g)/16 + exact/L, for a window of 64 tokens and 64 fetched ones 128/L.

    The paper prints no formula; this one gives all its sizes, with L the longest input: 4,096, 8,192 or 32,768 tokens. KIVI's
    rows have the same sizes there, for a window of 128. The copy on the host is not counted.
    """
    return (bits + 2 * 16 / group) / 16 + exact / length


def share(budget: float, length: float, prompt: float | None = None) -> float:
    """Returns the share of `length` tokens that a budget keeps, given as tokens (int) or as a share of `prompt` tokens (float)."""
    tokens = budget * prompt if isinstance(budget, float) and prompt is not None else budget
    return tokens / length


def kept_bits(share: float) -> float:
    """Bits per value if only a `share` of the tokens is kept, at 16 bits: MiKV's table 1 counts eviction so."""
    return 16 * min(1.0, share)
