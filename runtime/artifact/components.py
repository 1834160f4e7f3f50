"""The calibrated components in an artifact, for the method `klt`: allocation of bits, loss for a predicted error, bases and codecs.

Keys have components before RoPE or after it. Before RoPE statistics do not depend on positions, and fewer directions matter; these
components are the default if the artifact has them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import MOST_BITS, ROLES, Allocator, Words
from calib.runtime.artifact.transform_tensors import LOSSES, PREDICTED
from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.stages.codec import Codec, MixedQuant, Sized, TrellisQuant
from calib.runtime.stages.codec.sized import size_bytes
from calib.runtime.stages.prediction import Prediction
from calib.runtime.stages.transform import Basis, inverse

ROPE = ("before", "after")
READER = "klt"  # the method that messages about missing tensors name
# Limits far above a fit's values: it shrinks its weights and covariances by a hundredth, so the condition is below 100 sqrt(D).
MOST_CONDITION = 1e6  # the largest condition of a basis; beyond it float32 rows do not determine the inverse
MOST_REACH = 2.0**20  # the largest reach of a component's range in a channel: 16 times the largest number of float16
MOST_RANGES = 1e12  # the most ranges of a component in a standard deviation of a channel
TRELLIS_STEP = 9 / 16  # in steps of a uniform code; best is 1 / 2 for Gaussian components, 5 / 8 for those of SmolLM2
# A trellis code's error over a uniform code's at 0 ... 8 bits, for Gaussian components: .67, .99, .93 and .89 dB less.
TRELLIS_ERRORS = (1.0, 0.857, 0.796, 0.807, 0.815, 0.815, 0.815, 0.815, 0.815)
LEAST_DEVIATION = 1e-12  # the least deviation of a component by which a token's size is computed
LEAST_LOG = math.log(torch.finfo(torch.float32).tiny)  # used for an error or loss of 0
MOST_LOG = 700.0  # the exponential of larger numbers overflows float64


@dataclass(frozen=True)
class Coding:
    """How `klt` codes a model; it determines which tensors of the artifact are used.

    Attributes:
        rope: whether the components are of keys "before" or "after" RoPE.
        size: whether every token has a size, by which its components are divided.
        predict: whether values are predicted from keys.
        trellis: whether levels are those of a trellis code, with steps that follow from the artifact's.
        whole_words: whether sizes are stored in words of 16 bits, as in stored chunks.
        joint: whether all heads of a layer have one basis, as stored chunks may (`runtime/storage/joint_layer.py`); with `size` and
            `predict`.
    """

    rope: str
    size: bool = False
    predict: bool = False
    trellis: bool = False
    whole_words: bool = False
    joint: bool = False

    def name(self, role: str, kind: str) -> str:
        """The name of the tensor `kind` ("mean", "basis", "steps" or "errors") of "keys" or "values"."""
        if self.joint:
            return f"{role}.storage.{kind}"
        if self.predict and role == "values" and kind != "mean":
            return f"{PREDICTED}.{kind}"
        if self.size and kind in ("steps", "errors"):
            return f"{role}.klt.sized.{kind}"
        return f"{stem_of(role, self.rope)}.{kind}"

    def size_bytes(self, heads: int) -> int:
        """Bytes of a token's sizes for so many KV heads in each stream."""
        return size_bytes(heads, self.whole_words) if self.size else 0

    @property
    def plain(self) -> bool:
        """Whether there are neither sizes nor predictions nor trellis codes."""
        return not (self.size or self.predict or self.trellis)


# One allocator for all budgets of an artifact and coding, because it takes long to make.
_allocators: "WeakKeyDictionary[Artifact, dict[Coding, Allocator]]" = WeakKeyDictionary()


def coding_of(artifact: Artifact, rope: str | None = None) -> Coding:
    """The plain coding for components of keys "before" or "after" RoPE; None is before if the artifact has these, else after."""
    return Coding(rope or ("before" if artifact.has("keys.klt.before.errors") else "after"))


def stem_of(role: str, rope: str) -> str:
    """The prefix of the names of a stream's plain tensors, i.e. without sizes or predictions."""
    return "keys.klt.before" if role == "keys" and rope == "before" else f"{role}.klt"


def allocator(artifact: Artifact, coding: Coding | None = None) -> Allocator:
    """Returns the allocator of bits for the artifact's `errors` tensors and a coding (None: the default one); cached."""
    own, coding = _allocators.setdefault(artifact, {}), coding or coding_of(artifact)
    if coding not in own:
        left = torch.tensor(TRELLIS_ERRORS if coding.trellis else (1.0,) * (MOST_BITS + 1), dtype=torch.float32)
        errors = {role: artifact.tensor(coding.name(role, "errors"), READER) * left for role in ROLES}
        own[coding] = Allocator(errors, coding.size_bytes(errors["keys"].shape[1]))
    return own[coding]


def positions_measured(artifact: Artifact) -> int | None:
    """The number of positions at which the fit measured keys, from the artifact's provenance; None if that does not tell."""
    data = artifact.provenance.get("data")
    found = [data.get(name) for name in ("length", "positions")] if isinstance(data, Mapping) else []
    return max((number for number in found if type(number) is int), default=None)


def error_at(artifact: Artifact, loss: float, coding: Coding | None = None) -> float:
    """Returns the predicted error at which the fit measured `loss` (nats a token), interpolated in logarithms between its points.

    Raises ValueError for a loss outside what the fit measured, or for a coding without measured losses.
    """
    errors, losses = _curve(artifact, coding)
    if not losses[0] <= math.log(loss) <= losses[-1]:
        low, high = losses.exp()[[0, -1]].tolist()
        raise ValueError(
            f"loss={loss:g} is outside what the fit measured, {low:.3g} ... {high:.3g} nats a token; "
            "give a loss in this range, or a budget in bits"
        )
    return math.exp(min(MOST_LOG, interpolated(losses, errors, math.log(loss))))


def loss_at(artifact: Artifact, error: float, coding: Coding | None = None) -> float:
    """Returns the loss to expect at a predicted error, in nats a token, interpolated in logarithms between the fit's points;
    extrapolated from the nearest two beyond them."""
    errors, losses = _curve(artifact, coding)
    at = math.log(error) if error > 0 else LEAST_LOG
    return math.exp(min(MOST_LOG, interpolated(errors, losses, at)))


def has_losses(artifact: Artifact) -> bool:
    """Whether the fit measured the loss of at least two budgets, so that `loss_at` works."""
    name = LOSSES[coding_of(artifact).rope]
    return artifact.has(name) and len(artifact.tensor(name)) > 1


def _curve(artifact: Artifact, coding: Coding | None) -> tuple[Tensor, Tensor]:
    """The logarithms of predicted errors and of measured losses, each `[n]`, n the number of budgets measured."""
    usual = coding_of(artifact)
    coding = coding or usual
    if not coding.plain:
        raise ValueError(
            "loss with size, predict or trellis: the fit measured losses without them; give a budget in bits"
        )
    rope = coding.rope
    if rope != usual.rope and not artifact.has(LOSSES[rope]):
        raise ValueError(
            f"rope={rope!r}: the fit measured losses of keys {usual.rope} RoPE; leave rope out, or give a budget in bits"
        )
    curve = artifact.tensor(LOSSES[rope], READER)
    if len(curve) < 2:
        raise ValueError(
            f"the artifact has measured losses of {len(curve)} budgets, and interpolation needs two; give a budget in bits"
        )
    errors, losses = curve.double().log().clamp(min=LEAST_LOG).T.contiguous()
    return errors, losses


def interpolated(x: Tensor, y: Tensor, at: float) -> float:
    """y at x = `at`, by linear interpolation and extrapolation through points with x not falling, at least two; where the two
    nearest points have the same x, the latter's y."""
    right = int(torch.searchsorted(x, torch.tensor(at, dtype=x.dtype)).clamp(1, len(x) - 1))
    (x0, x1), (y0, y1) = x[right - 1 : right + 1].tolist(), y[right - 1 : right + 1].tolist()
    return y1 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True)
class LayerCodes:
    """How a layer's keys or values are coded.

    Attributes:
        basis: maps tokens to components and back.
        codec: encodes the components.
        half_steps: float64 `[kv_heads, components, D]`: what half a step of each component changes in the channels of a token of
            size 1.
    """

    basis: Basis
    codec: Codec
    half_steps: Tensor


def layer_codes(artifact: Artifact, role: str, layer: int, words: Words, coding: Coding) -> LayerCodes:
    """Returns basis and codec of a layer's keys or values, for the components that have fields in `words`, in plane form.

    Raises `ArtifactError` if the basis cannot be inverted, or if ranges are too large to compute with in float32.
    """
    mean, rows, steps, errors = (
        artifact.tensor(coding.name(role, kind), READER)[layer] for kind in ("mean", "basis", "steps", "errors")
    )
    stem = coding.name(role, "steps").removesuffix(".steps")
    rows, ranges = rows.double(), steps.double() * 2.0 ** torch.arange(steps.shape[-1], dtype=torch.float64)
    columns = _inverse(coding.name(role, "basis"), layer, rows)  # [kv_heads, D, components]
    deviation = errors[..., 0].double().sqrt()
    spread = (columns.square() @ errors[..., :1].double())[..., 0].sqrt()
    _check_ranges(stem, layer, rows, columns, ranges, spread)
    heads, channels = mean.shape
    most = max(words.counts)
    into = torch.zeros(heads, channels, len(words.widths) * most, dtype=torch.float64)
    back = torch.zeros(heads, len(words.widths) * most, channels, dtype=torch.float64)
    weights = torch.zeros(heads, 1, len(words.widths) * most, dtype=torch.float64)
    # The range of each component, which weighs its errors along a trellis path: without that unit errors of all count the same.
    reaches = torch.zeros_like(weights)
    for head, count in enumerate(words.counts):
        coded = min(len(words.widths) * count, channels)
        for plane, width in enumerate(words.widths):
            own = slice(plane * count, min((plane + 1) * count, channels))
            at = slice(plane * most, plane * most + max(0, own.stop - own.start))
            # In units of reach a uniform code's step is 2^(1 - width), a trellis code's 2^-width; it shall be TRELLIS_STEP of that.
            reach = ranges[head, own, width - 1] * (2 * TRELLIS_STEP if coding.trellis else 1)
            into[head, :, at] = (rows[head, own] / reach[:, None]).T
            back[head, at] = (columns[head][:, own] * reach).T
            reaches[head, 0, at] = reach
            # A component without variance in the corpus does not count in a token's size.
            told = reach / deviation[head, own].clamp(min=LEAST_DEVIATION) / math.sqrt(coded)
            weights[head, 0, at] = told.where(deviation[head, own] > 0, 0)
    codes: MixedQuant | TrellisQuant = MixedQuant(words.widths, words.counts)
    if coding.trellis:
        relative = reaches / reaches.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        codes = TrellisQuant(words.widths, words.counts, relative.float())
    step, least = codes.step(mean.device), codes.least(mean.device)
    found = Basis.of(mean, into, back, spread, step, least, coding.size)
    codec: Codec = Sized(codes, weights.float(), coding.whole_words) if coding.size else codes
    return LayerCodes(found, codec, back * step.double()[:, None] / 2)


def prediction(artifact: Artifact, layer: int, keys: LayerCodes) -> Prediction:
    """Returns the prediction of a layer's values from the codes of its keys; raises `ArtifactError` if predictions are too
    large."""
    matrix = artifact.tensor(f"{PREDICTED}.matrix", READER)[layer].double()
    half_steps = keys.half_steps @ matrix.mT
    reach = half_steps.abs().sum(1).amax() * 2.0**MOST_BITS
    if not bool(reach <= MOST_REACH * 2.0**MOST_BITS):
        raise ArtifactError(
            f"the tensor '{PREDICTED}.matrix' does not fit the tensors of keys at layer {layer}: it predicts values up "
            f"to {reach:.3g}, expected at most {MOST_REACH * 2.0**MOST_BITS:g}; {FIT_AGAIN}"
        )
    return Prediction.of(half_steps)


def _inverse(name: str, layer: int, rows: Tensor) -> Tensor:
    """The inverse of each head's basis, float64 `[kv_heads, D, D]`; raises `ArtifactError` for a bad condition."""
    # The condition is that of rows scaled to equal length: lengths may differ at will, but directions must be distinct.
    lengths = rows.norm(dim=-1, keepdim=True)
    columns = inverse(rows / lengths)
    condition = (columns.norm(dim=(-2, -1)) * math.sqrt(rows.shape[-1])).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if not bool((condition <= MOST_CONDITION).all()):
        head = int((~(condition <= MOST_CONDITION)).nonzero()[0])
        raise ArtifactError(
            f"tensor '{name}' cannot be inverted at layer {layer}, head {head}: its condition is {condition[head]:.3g}, "
            f"expected at most {MOST_CONDITION:g}; {FIT_AGAIN}"
        )
    return columns / lengths.mT


def _check_ranges(stem: str, layer: int, rows: Tensor, columns: Tensor, ranges: Tensor, spread: Tensor) -> None:
    """Raises `ArtifactError` if components' `ranges [kv_heads, D, 8]` are too large in channels, or channels' deviations `spread
    [kv_heads, D]` too large, absolutely or in ranges, for float32."""
    reach = (columns.abs() * ranges.amax(-1)[:, None]).amax((-2, -1))
    told = (rows.abs() * spread[:, None] / ranges.amin(-1)[..., None]).amax((-2, -1))
    for found, most, what in (
        (reach, MOST_REACH, "range of a component, in channels"),
        (spread.amax(-1), MOST_REACH, "standard deviation of a channel"),
        (told, MOST_RANGES, "standard deviation of a channel, in ranges of a component"),
    ):
        if not bool((found <= most).all()):
            head = int((~(found <= most)).nonzero()[0])
            raise ArtifactError(
                f"the tensors '{stem}' are out of range at layer {layer}, head {head}: the {what}, is {found[head]:.3g}, "
                f"expected at most {most:g}; {FIT_AGAIN}"
            )
