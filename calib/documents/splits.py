"""The split of generated documents into training and evaluation, by two rules that every document obeys, whatever its seed.

1. A pair of key and number belongs to `eval` if (crc32(key) + number) mod 5 = 0, else to `train`. So for every key one number in
   five of each length is an `eval` number.
2. Two keys in neighbouring lines belong to `eval` if crc32 of the two, in alphabetical order, is divisible by 5, else to `train`.
   So no two neighbouring lines of an evaluation document were neighbours in a training document, and an answer cannot have been
   learned with its context.

The keys themselves are shared: a key that was never trained on would only test its untrained embedding.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Literal

Split = Literal["train", "eval"]
EVAL_ONE_IN = 5
LEAST_CHOICE = 60  # keys left to choose the last neighbour from: none fits in one of 0.8^-60 = 650,000 cases
ATTEMPTS = 100


def split_of(key: str, number: str) -> Split:
    """Returns the split to which the pair of key and number belongs."""
    return "eval" if (zlib.crc32(key.encode()) + int(number)) % EVAL_ONE_IN == 0 else "train"


def split_of_neighbours(one: str, other: str) -> Split:
    """Returns the split in whose documents the two keys may be in neighbouring lines, in either order."""
    return "eval" if zlib.crc32(" ".join(sorted((one, other))).encode()) % EVAL_ONE_IN == 0 else "train"


def number_for(rng: random.Random, key: str, digits: int, split: Split) -> str:
    """Returns a random number of exactly `digits` digits (leading zeros allowed) whose pair with `key` belongs to `split`."""
    while True:  # one draw in five, or four in five, succeeds
        number = f"{rng.randrange(10**digits):0{digits}d}"
        if split_of(key, number) == split:
            return number


def keys_for(rng: random.Random, pool: Sequence[str], count: int, split: Split) -> list[str]:
    """Returns `count` different keys of `pool` in random order, with all pairs of neighbours in `split`.

    Raises ValueError if `count` is below 1 or above `len(pool) - 60`, or no order was found.
    """
    most = len(pool) - LEAST_CHOICE
    if not 1 <= count <= most:
        raise ValueError(f"lines={count}: a document has 1 to {most} keyed lines ({len(pool)} keys)")
    for _ in range(ATTEMPTS):
        rest = rng.sample(pool, len(pool))
        keys = [rest.pop()]
        while len(keys) < count:
            position = next((i for i, key in enumerate(rest) if split_of_neighbours(keys[-1], key) == split), None)
            if position is None:
                break
            keys.append(rest.pop(position))
        else:
            return keys
    raise ValueError(f"lines={count}: no order of keys for split={split!r} in {ATTEMPTS} attempts; ask for fewer lines")
