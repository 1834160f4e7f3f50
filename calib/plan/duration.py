"""How long a fit takes, extrapolated from pieces of its work.

Assumed growth: a layer's forward with its floating-point operations (2 for each weight and token, and 2 * 2 * head_dim for each
query of a head and key that it attends to: scores and weighted sum); a statistic with the number of tokens; a dictionary with its
training steps in all epochs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from calib.fit import head_losses, loss_curve
from calib.fit.calibration import Calibration
from calib.fit.dictionary_tasks import chunks
from calib.neural_dict.dictionary import RESEED_VECTORS
from calib.plan.capture_cost import Pass, Sizes
from calib.plan.meta_model import MetaModel
from calib.plan.neighbours import watched
from calib.plan.probe import Pace
from calib.runtime.artifact.tensor_registry import STREAMS

Timed = TypeVar("Timed")


@dataclass(frozen=True)
class Work:
    """The work of a fit, from which the timings of a `Pace` are extrapolated.

    Attributes:
        calibration: the fit's options.
        meta_model: the model.
        sizes: sizes of the corpus.
        passes: passes over the corpus.
        statistics: bytes of all statistics.
    """

    calibration: Calibration
    meta_model: MetaModel
    sizes: Sizes
    passes: list[Pass]
    statistics: int

    def seconds(self, pace: Pace) -> dict[str, float]:
        """Returns the seconds of every stage, and of the checkpoints of all stages together."""
        found = {one.stage.name: self._of_pass(one, pace) for one in self.passes}
        if self.calibration.klt:
            found["losses"] = self._of_losses(pace)
        if self.calibration.dictionary.atoms:
            found["layer groups"] = self._of_grouping(pace)
            found["dictionaries"] = self._of_dictionaries(pace)
        found["checkpoints"] = sum(one.saves for one in self.passes) * self.statistics * pace.byte
        return found

    def _of_pass(self, one: Pass, pace: Pace) -> float:
        layers, tokens = self.meta_model.shape.layers, one.batches * self.sizes.batch * self.sizes.length
        tokens = min(tokens, one.sequences * self.sizes.length)
        piece = flops(self.meta_model, pace.tokens, pace.length)
        forward = pace.forward * flops(self.meta_model, tokens, self.sizes.length) / piece
        observing = sum(pace.observe[name] for name in one.statistics) * tokens / pace.tokens
        return layers * (forward + observing + sum(pace.finish[name] for name in one.statistics))

    def _of_losses(self, pace: Pace) -> float:
        """Seconds of the model's forwards that measure losses; the work of the coded cache itself is left out.

        There is one forward with exact keys and values, one for each bit budget, and one for the keys and one for the values of
        every head that is measured on a sequence.
        """
        layers, heads, length = self.meta_model.shape.layers, self.meta_model.shape.kv_heads, self.sizes.length
        tokens = (1 + len(loss_curve.BITS)) * min(self.sizes.heldout, loss_curve.SEQUENCES) * length
        sequences = min(self.sizes.train, head_losses.SEQUENCES)
        measured = sum(len(head_losses.heads_of(sequence, 0, heads, sequences)) for sequence in range(sequences))
        # An answer is forwarded only through the layer whose keys or values are coded, and the layers above it.
        tokens += sequences * length + (layers + 1) * measured * head_losses.said_of(length)
        piece = flops(self.meta_model, pace.tokens, pace.length)
        return layers * pace.forward * flops(self.meta_model, tokens, length) / piece

    def _of_grouping(self, pace: Pace) -> float:
        layers = self.meta_model.shape.layers
        return len(STREAMS) * layers * (layers - 1) / 2 * pace.pair

    def _of_dictionaries(self, pace: Pace) -> float:
        """Seconds of training one dictionary for each layer; fewer dictionaries train on as many vectors in total."""
        options, layers, total = self.calibration.dictionary, self.meta_model.shape.layers, 0.0
        for name in STREAMS:
            samples, heldout = (count * chunks(name, options) for count in (options.samples, options.heldout_samples))
            steps = options.epochs * -(-samples // options.batch_size)
            validated = (options.epochs + 1) * heldout + options.epochs * options.reseed * RESEED_VECTORS
            own = steps * pace.step[name] + validated * pace.validation[name] + samples * pace.start[name]
            total += layers * own
        return total / min(self.sizes.processes, len(STREAMS) * layers)


def flops(meta_model: MetaModel, tokens: int, length: int) -> float:
    """Floating-point operations of a layer's forward over `tokens` tokens in sequences of `length` tokens."""
    shape = meta_model.shape
    return tokens * (2.0 * layer_parameters(meta_model) + 2 * shape.heads * shape.head_dim * length)


def layer_parameters(meta_model: MetaModel) -> int:
    """Mean number of weights of a layer: all parameters except the embedding and the output head."""
    model = meta_model.model
    outside = {id(part): part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}
    weights = {id(one): one.numel() for part in outside.values() for one in part.parameters()}
    return (meta_model.parameters - sum(weights.values())) // meta_model.shape.layers


def extrapolated(
    measured: Callable[[], tuple[Timed, dict[str, float]]],
    device: torch.device,
    off: tuple[float, float],
    pace: Callable[[Timed], dict[str, Any]],
) -> dict[str, Any]:
    """Returns the seconds of every stage, their sum with an uncertainty range, and the timings that they were extrapolated from.

    Args:
        measured: times pieces of the work on `device`; returns the timings and the seconds of every stage.
        device: where the pieces are timed.
        off: smallest and largest ratio of real to predicted time.
        pace: turns the timings into plain JSON.
    """
    began = time.perf_counter()
    with watched() as neighbours:
        timed, stages = measured()
    taken = time.perf_counter() - began
    total = sum(stages.values())
    return {
        "total": total,
        "range": [total * off[0] * (1 - (neighbours.share or 0.0)), total * off[1]],
        "neighbours": neighbours.share,
        "busy": neighbours.busy,
        "stages": stages,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "timed_for": taken,
        "pace": pace(timed),
    }
