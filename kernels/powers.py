"""Integer helpers for launch sizes. Triton's functions of the same names unwrap their arguments first, which takes ten times as
long on the host."""


def next_power_of_2(count: int) -> int:
    """Least power of two that is >= `count`; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def cdiv(count: int, size: int) -> int:
    """`count` / `size`, rounded up."""
    return -(-count // size)
