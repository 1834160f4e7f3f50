"""Measures bits and losses of every candidate in every layer, by storing captured keys and values in the method's own store.

Attention over a prompt is exact, so a layer's store does not change the inputs of other layers. Therefore the model runs once over
the text, and each layer's captured sample is stored with all candidates; the sample is freed before the next layer.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.capture import stream
from calib.capture.sample import LayerSample
from calib.errors import UsageError
from calib.evaluate.stored import knows_positions
from calib.runtime import Artifact, compress
from calib.runtime.attend.request import QKV, AttendRequest
from calib.runtime.layer import CompressedLayer
from calib.runtime.logits import Logits
from calib.runtime.methods import Geometry
from calib.runtime.ordered.store import OrderedStore
from calib.runtime.rotation import Rotation
from calib.runtime.store import LayerContext, Plan
from calib.runtime.tiered.forward_stats import ForwardStats
from calib.runtime.tiered.store import TieredStore
from calib.tune.bits import bits_per_value
from calib.tune.loss import Loss, losses, sensitivities


@dataclass(frozen=True)
class Subject:
    """The layers of a model that a cache compresses.

    Attributes:
        model: the model in evaluation mode, on its device.
        artifact: the model's artifact, checked.
        layers: indices of the compressed layers in the model.
        sliding: the sliding window of all of these layers, or None.
        seed: seed for methods that use random numbers.
    """

    model: PreTrainedModel
    artifact: Artifact
    layers: Sequence[int]
    sliding: int | None
    seed: int

    @staticmethod
    def of(model: PreTrainedModel, artifact: Artifact, seed: int) -> "Subject":
        """Returns the layers that `compress` compresses; raises the errors of `compress` for a model or artifact that it
        refuses."""
        with compress(model, "full", artifact, seed=seed) as cache:
            layers = [number for number, layer in enumerate(cache.layers) if isinstance(layer, CompressedLayer)]
            return Subject(model, artifact, layers, cache.sequences.sliding, seed)

    @property
    def geometry(self) -> Geometry:
        """The model's shape."""
        return Geometry.of(self.model.config.get_text_config(decoder=True))

    def context(self, layer: int, plan: Plan) -> LayerContext:
        """Returns the context in which a plan of a layer is opened."""
        remedy = plan.needs_rope
        rotation = None if remedy is None else Rotation.of(self.model, remedy)
        return LayerContext(self.layers.index(layer), self.seed, rotation)


@dataclass(frozen=True)
class Measured:
    """`bits` per value and `loss` per token by layer (outer) and candidate (inner), and the `layers`' indices in the model."""

    layers: Sequence[int]
    bits: Sequence[Sequence[float]]
    loss: Sequence[Sequence[float]]


def measure(
    subject: Subject,
    batches: Sequence[Tensor],
    plans: Sequence[dict[int, Plan]],
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Measures every candidate on `batches` of token ids `[rows, tokens]` of equal length; `advance` is called after each layer.

    Raises UsageError if the sequences are too short for a candidate to encode a token, or longer than a sliding window.
    """
    length = batches[0].shape[1]
    if subject.sliding is not None and subject.sliding < length:
        raise UsageError(
            f"--length {length}: every layer of this model has a sliding window of {subject.sliding} tokens; give at most that"
        )
    sums: dict[tuple[int, int], dict[str, Loss]] = {}
    bits: dict[tuple[int, int], float] = {}

    def take_in(sample: LayerSample) -> None:
        if sample.layer not in subject.layers:
            return
        worth, shown = sensitivities(subject.artifact, sample.layer, sample.keys.device), {}
        for number, plan in enumerate(plans):
            store, told = filled(plan[sample.layer], sample, tokens, subject, shown)
            key = (sample.layer, number)
            found = losses(sample, store, worth)
            sums[key] = {role: loss + sums[key][role] for role, loss in found.items()} if key in sums else found
            bits[key] = bits_per_value(store, told)
        advance()

    for tokens in batches:
        everything = torch.ones_like(tokens, dtype=torch.bool)
        stream(subject.model, tokens, everything, torch.arange(tokens.numel()).view(tokens.shape), take_in)
    empty = next((loss for found in sums.values() for loss in found.values() if not loss.tokens), None)
    if empty is not None:
        raise UsageError(
            f"--length {length}: a window of exact tokens leaves nothing to encode; give more than twice as many"
        )
    numbers = range(len(plans))
    return Measured(
        subject.layers,
        [[bits[layer, number] for number in numbers] for layer in subject.layers],
        [[sum(loss.mean for loss in sums[layer, number].values()) for number in numbers] for layer in subject.layers],
    )


@torch.no_grad()
def filled(
    plan: Plan, sample: LayerSample, ids: Tensor, subject: Subject, shown: dict[Hashable, ForwardStats]
) -> tuple[OrderedStore | TieredStore, bool]:
    """Stores the sample as one prompt; returns the store, and whether it records positions only for this measurement.

    `ids` are the sample's token ids, for probes that select by them. `shown` caches attention statistics of the sample by what
    candidates observe, so that attention is computed once for all candidates that observe the same.
    """
    context = subject.context(sample.layer, plan)
    sequences = plan.sequences(1, subject.sliding)
    store: OrderedStore | TieredStore = plan.open(sample.keys, sample.values, sequences, context)  # type: ignore[assignment]
    told = not knows_positions(store)
    if told:
        store = plan.with_positions().open(sample.keys, sample.values, sequences, context)  # type: ignore[assignment]
    batch, width = sample.mask.shape
    sequences.ids = ids if plan.needs_token_ids else None
    forward = sequences.begin(1, batch, width, None)
    store.prepare(forward)
    if isinstance(store, TieredStore) and store.observes:
        looked = store.plan.looked_at
        if looked not in shown:
            given = QKV(sample.queries, sample.keys, sample.values)
            logits = Logits(sample.scaling, sample.softcap, sample.window)
            store.attend(AttendRequest(forward, range(batch), logits, given, observe=True))
            shown[looked] = copy_of(store.shown)
        store.shown = copy_of(shown[looked])
    store.store(forward, sample.keys, sample.values)
    forward.stored()
    return store, told


def copy_of(shown: ForwardStats) -> ForwardStats:
    """Copies the statistics without copying their tensors, since a store removes entries from its own."""
    copied = ForwardStats()
    copied.seen, copied.queries, copied.policies = dict(shown.seen), dict(shown.queries), dict(shown.policies)
    return copied
