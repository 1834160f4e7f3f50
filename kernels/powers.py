"""Sizes of launches as the host works them out. Triton's own functions of these names unwrap their arguments first, which takes ten
times as long."""


def next_power_of_2(count: int) -> int:
    """The least power of two that is no less than `count`; 1 for none."""
    return 1 << max(0, count - 1).bit_length()


def cdiv(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)
