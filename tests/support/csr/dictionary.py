"""Oracle of a row's online atoms: random vectors of its first chunk, and those with the largest errors (arXiv:2412.11741, "online
part").
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from csr.pursuit import DOUBT, lead, pursue, readings, rebuilt
from importance.coding import halves
from importance.draws import counter_hash

HEAD = {"keys": 1, "values": 2}  # the stream's number in the hash of the draws

# Error of an atom's entry in float32, relative: two products, a sum, a square root and a quotient, together some 4 units of 2^-24.
ENTRY = 2.0**-21
FINE = 2.0**-21  # float16 neighbours that are no further apart (subnormal ones) make no difference to comparisons


@dataclass(frozen=True)
class Sampled:
    """Atoms `[N + M, d]`, float16 numbers, and whether float32 certainly gives the same ones."""

    atoms: np.ndarray
    sure: bool


def sample(
    items: np.ndarray,
    offline: np.ndarray,
    online: int,
    steps: int,
    orthogonal: bool,
    position: tuple[int, int, str],
    share: float = 0.5,
) -> Sampled:
    """Add `online` atoms from `items [n, d]`, token by token, to `offline [N, d]`; `position` is (seed, layer, stream).

    The share `share` of them, rounded down, are the items with the largest error under the offline atoms or, without these, under
    the random ones (without either, x^ is 0).
    """
    count = min(online, len(items))
    reverse = int(Fraction(str(share)) * count)
    uniform = count - reverse
    seed, layer, stream = position
    draws = [counter_hash(seed, layer, HEAD[stream], item) for item in range(len(items))]
    order = np.argsort(draws, kind="stable")
    drawn, others = order[:uniform], np.sort(order[uniform:])
    own = np.zeros((online, items.shape[1]))
    own[:uniform] = normalised(items[drawn])
    base = offline if len(offline) else own[:uniform]
    sure = True
    if reverse:
        error = errors(items[others], base, steps, orthogonal)
        worst = np.argsort(-error, kind="stable")
        chosen, refused = others[worst[:reverse]], others[worst[reverse:]]
        own[uniform:count] = normalised(items[chosen])
        sure = certain(items, chosen, refused, base, steps, orthogonal)
    return Sampled(np.concatenate([offline, own]), sure)


def normalised(items: np.ndarray) -> np.ndarray:
    """Items divided by their norms and rounded to float16; zeros stay zeros."""
    size = np.linalg.norm(items, axis=1, keepdims=True)
    return (items / np.where(size > 0, size, 1)).astype(np.float16).astype(np.float64)


def errors(items: np.ndarray, base: np.ndarray, steps: int, orthogonal: bool) -> np.ndarray:
    """|x - x^|^2 of every item, with unrounded coefficients."""
    if not len(base):
        return (items**2).sum(1)
    return ((items - rebuilt(*pursue(items, base, steps, orthogonal), base)) ** 2).sum(1)


def certain(
    items: np.ndarray, chosen: np.ndarray, refused: np.ndarray, base: np.ndarray, steps: int, orthogonal: bool
) -> bool:
    """Whether every chosen item has a larger error than every refused one however float32 decides near-ties, or equals it."""
    if not len(refused):
        return True
    least = np.array([bounds(items[item], base, steps, orthogonal)[0] for item in chosen])
    most = np.array([bounds(items[item], base, steps, orthogonal)[1] for item in refused])
    close = np.argwhere(least[:, None] <= most + 2.0**-16 * abs(most))
    return all(np.array_equal(items[chosen[one]], items[refused[other]]) for one, other in close)


def bounds(item: np.ndarray, base: np.ndarray, steps: int, orthogonal: bool) -> tuple[float, float]:
    """The least and the largest squared error of an item over all choices of atoms that float32 may make."""
    if not len(base) or lead(item[None], base, steps, orthogonal)[0] > DOUBT:
        (only,) = errors(item[None], base, steps, orthogonal)
        return only, only
    found = [
        ((item - coefficient @ base[index]) ** 2).sum() if len(index) else (item**2).sum()
        for index, coefficient, _ in readings(item, base, steps, orthogonal)
    ]
    return min(found), max(found)


def unclear(items: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Bool `[n]`: items that float32 may normalise to another float16 atom; `size [n, d]` is the magnitude of the numbers from
    which their entries are computed."""
    norm = np.linalg.norm(items, axis=1, keepdims=True)
    norm = np.where(norm > 0, norm, 1)
    near, other = halves(items / norm, ENTRY * size / norm)
    return (abs(near - other) > FINE).any(1)
