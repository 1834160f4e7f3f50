"""What an artifact knows of components: how bits are shared out over them, what an error of them costs, their bases.

Keys have components before RoPE or after it. Before it statistics do not depend on places, and fewer directions matter; what is
asked of an artifact is asked of those where nothing else is said, if it has them.
"""

import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from calib.runtime.allocation import ROLES, Allocator, Words
from calib.runtime.artifact import Artifact
from calib.runtime.stages.codec import MixedQuant
from calib.runtime.stages.transform import Basis
from calib.runtime.transform_tensors import LOSSES

ROPE = ("before", "after")
READER = "klt"  # the method that misses what is missing

# Curves of a model's components, for all budgets that are asked of an artifact.
_allocators: "WeakKeyDictionary[Artifact, dict[str, Allocator]]" = WeakKeyDictionary()


def rope_of(artifact: Artifact, asked: str | None = None) -> str:
    """Where keys have their components: as asked; before RoPE where the artifact has such; else after it."""
    return asked or ("before" if artifact.has("keys.klt.before.errors") else "after")


def stem_of(role: str, rope: str) -> str:
    """What the names of a stream's tensors begin with."""
    return "keys.klt.before" if role == "keys" and rope == "before" else f"{role}.klt"


def allocator(artifact: Artifact, rope: str | None = None) -> Allocator:
    """Any budget's allocation, from the artifact's `errors`."""
    own, rope = _allocators.setdefault(artifact, {}), rope_of(artifact, rope)
    if rope not in own:
        own[rope] = Allocator({role: artifact.tensor(f"{stem_of(role, rope)}.errors", READER) for role in ROLES})
    return own[rope]


def places_measured(artifact: Artifact) -> int | None:
    """The places at which the corpus had keys, as the artifact says; None where it does not."""
    data = artifact.provenance.get("data")
    found = [data.get(name) for name in ("length", "positions")] if isinstance(data, Mapping) else []
    return max((number for number in found if type(number) is int), default=None)


def error_at(artifact: Artifact, loss: float, rope: str | None = None) -> float:
    """The predicted error at which the fit measured this loss, between its points on a line through their logarithms."""
    errors, losses = _curve(artifact, rope)
    if not losses[0] <= math.log(loss) <= losses[-1]:
        low, high = losses.exp()[[0, -1]].tolist()
        raise ValueError(
            f"loss={loss:g} is outside what the fit measured, {low:.3g} ... {high:.3g} nats a token; ask for that, or bits"
        )
    return math.exp(interpolated(losses, errors, math.log(loss)))


def loss_at(artifact: Artifact, error: float, rope: str | None = None) -> float:
    """What the fit makes expect of a predicted error, in nats a token; beyond its points on the line of the nearest two."""
    errors, losses = _curve(artifact, rope)
    return math.exp(interpolated(errors, losses, math.log(error)))


def _curve(artifact: Artifact, rope: str | None) -> tuple[Tensor, Tensor]:
    """Logarithms of predicted errors and of measured losses."""
    rope = rope_of(artifact, rope)
    if rope != rope_of(artifact) and not artifact.has(LOSSES[rope]):
        raise ValueError(
            f"rope={rope!r}: the fit measured losses of keys {rope_of(artifact)} RoPE; leave rope out, or give a budget in bits"
        )
    errors, losses = artifact.tensor(LOSSES[rope], READER).double().log().T.contiguous()
    return errors, losses


def interpolated(x: Tensor, y: Tensor, at: float) -> float:
    """y at `at`, on the lines through points whose x does not fall, at least two; of points with the same x the latter's."""
    right = int(torch.searchsorted(x, torch.tensor(at, dtype=x.dtype)).clamp(1, len(x) - 1))
    (x0, x1), (y0, y1) = x[right - 1 : right + 1].tolist(), y[right - 1 : right + 1].tolist()
    return y1 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def basis(artifact: Artifact, role: str, layer: int, words: Words, rope: str) -> Basis:
    """The components of a layer's keys or values that `words` have fields for, in their plane form."""
    stem = stem_of(role, rope)
    mean, rows, steps, errors = (
        artifact.tensor(f"{stem}.{name}", READER)[layer] for name in ("mean", "basis", "steps", "errors")
    )
    rows = rows.double()
    columns = torch.linalg.inv(rows)  # [kv_heads, D, components]
    spread = (columns.square() @ errors[..., :1].double())[..., 0].sqrt()
    heads, channels = mean.shape
    most = max(words.counts)
    into = torch.zeros(heads, channels, len(words.widths) * most, dtype=torch.float64)
    back = torch.zeros(heads, len(words.widths) * most, channels, dtype=torch.float64)
    for head, count in enumerate(words.counts):
        for plane, width in enumerate(words.widths):
            own = slice(plane * count, min((plane + 1) * count, channels))
            at = slice(plane * most, plane * most + max(0, own.stop - own.start))
            reach = steps[head, own, width - 1].double() * 2 ** (width - 1)  # a step of 2^(1 - width) is this one
            into[head, :, at] = (rows[head, own] / reach[:, None]).T
            back[head, at] = (columns[head][:, own] * reach).T
    return Basis.of(mean, into, back, spread, MixedQuant(words.widths, words.counts).step(mean.device))
