"""The names of non-uniform levels (the method `kvquant`; KVQuant, arXiv:2401.18079, section 3.3).

Of L layers, H KV heads, D head_dim and n shares of outliers, float32:

    nuq.shares                    [n]             shares of outliers, both ends together; increasing, 0 <= s < 1
    keys.nuq.low, keys.nuq.high   [L, H, D, n]    quantiles s/2 and 1 - s/2 of the channel's keys before RoPE
    {stream}.nuq.levels.{bits}    [L, n, 2^bits]  rising levels on [-1, 1], of 2, 3 and 4 bits
"""

NUQ_SHARES = "nuq.shares"
NUQ_BITS = (2, 3, 4)


def levels_name(stream: str, bits: int) -> str:
    """The name of the tensor of a stream's levels."""
    return f"{stream}.nuq.levels.{bits}"
