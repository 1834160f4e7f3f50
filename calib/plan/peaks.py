"""The peak memory of each stage of a fit, counted (not measured) by running the stage on one layer of `meta` tensors.

GPU memory holds the weights, the statistics of all layers, a batch's activations and the temporaries of a statistic for one
layer; in the stage that computes derivatives, one sequence's activations in every layer. Host memory holds checkpoints while they
are written, which Lightning buffers twice, and the dictionaries' vectors. On a CPU, host memory holds all of this.
"""

import copy
import random
from dataclasses import dataclass

import torch

from calib.capture.capture import stream
from calib.capture.gradients import ANSWER, derivatives
from calib.capture.shape import Shape
from calib.fit.calibration import Calibration
from calib.fit.dictionary_tasks import chunks, sparsity
from calib.fit.stage import SENSITIVITY
from calib.kernels.matching_pursuit.reference import gram_is_cheaper, tile_rows
from calib.neural_dict.centroids import BATCH, TILE_ELEMENTS
from calib.neural_dict.options import DictionaryOptions
from calib.plan.capture_cost import Sizes
from calib.plan.meta_model import MetaModel
from calib.plan.meta_tensors import META, MetaTensors
from calib.runtime.artifact.tensor_registry import STREAMS
from calib.statistics.components import Components

FLOAT = 4
COPIES = 2  # copies of a checkpoint while it is saved: Lightning's buffer, and the bytes read from that buffer
STATE = 6  # atoms, their gradient, Adam's two moments, the best so far and the copy that is being written


@dataclass(frozen=True)
class Peak:
    """Bytes of a stage: `device` on a GPU, `host` beside it; on a CPU `host` is all."""

    stage: str
    device: int
    host: int


def peaks(calibration: Calibration, meta_model: MetaModel, sizes: Sizes, statistics: int, on_gpu: bool) -> list[Peak]:
    """Returns the peak of every stage; `statistics` are the bytes of all statistics."""
    resident, saving = meta_model.weights + statistics, COPIES * statistics
    found = [Peak("loading", meta_model.weights, meta_model.weights)] if on_gpu else []
    for stage, size in transients(calibration, meta_model, sizes).items():
        found.append(placed(stage, resident + size, saving, on_gpu))
    options = calibration.dictionary
    if options.atoms:
        vectors = stream_bytes(options, meta_model.shape)
        # The host holds both streams' vectors by group, and one stream's by layer as well; a GPU holds a copy of those by group.
        device = resident + training_bytes(options, meta_model.shape, on_gpu) + (2 * vectors if on_gpu else 0)
        found.append(placed("dictionaries", device, 3 * vectors, on_gpu))
    return found


def placed(stage: str, device: int, host: int, on_gpu: bool) -> Peak:
    """Returns the peak of a stage; without a GPU the `device` bytes are added to those of the host."""
    return Peak(stage, device, host) if on_gpu else Peak(stage, 0, device + host)


def transients(calibration: Calibration, meta_model: MetaModel, sizes: Sizes) -> dict[str, int]:
    """Returns for each stage the bytes in addition to weights and statistics while a full batch goes through a layer."""
    one, found = copy.deepcopy(calibration), {}
    # One bit width and one clip factor suffice: they are tried one after the other, in the same memory.
    one.bits, one.residual_bits, one.clip_factors = one.bits[:1], one.residual_bits[:1], (1.0,)
    model = meta_model.one_layer()
    with torch.no_grad(), MetaTensors() as memory, META:
        one.prepare(model, seed=0)
        for statistic in one.statistics.values():
            if isinstance(statistic, Components):
                statistic.widths = statistic.widths[:1]
        tokens = torch.empty(sizes.batch, sizes.length, dtype=torch.int64)
        real = torch.ones_like(tokens, dtype=torch.bool)
        for stage in one.stages():
            one.begin(stage)
            before = memory.most = memory.held
            if stage.name == SENSITIVITY:
                derivatives(model, tokens[:1], tokens[:1], random.random)
                found[stage.name] = meta_model.shape.layers * (memory.most - before) + answer_bytes(meta_model, sizes)
            else:
                stream(model, tokens, real, tokens, one.observe)
                found[stage.name] = memory.most - before
    return found


def answer_bytes(meta_model: MetaModel, sizes: Sizes) -> int:
    """Bytes of the tensors over the vocabulary for the last quarter of one sequence: logits and their derivative, in the model's
    dtype, float32 and, for sampling, float64."""
    positions = sizes.length // ANSWER
    return positions * meta_model.text.vocab_size * (2 * meta_model.model.dtype.itemsize + 3 * FLOAT + 2 * 2 * FLOAT)


def stream_bytes(options: DictionaryOptions, shape: Shape) -> int:
    """Bytes of the key vectors (or of the value vectors) of all layers that dictionaries are trained and validated on."""
    return shape.layers * (options.samples + options.heldout_samples) * shape.head_dim * FLOAT


def training_bytes(options: DictionaryOptions, shape: Shape, on_gpu: bool) -> int:
    """Bytes of all dictionaries in training, and of the steps that run at once (on a CPU, one for each thread)."""
    atoms, at_once = options.atoms * shape.kv_heads, 1 if on_gpu else torch.get_num_threads()
    state = sum(shape.layers * STATE * atoms * shape.head_dim // chunks(one, options) * FLOAT for one in STREAMS)
    return state + at_once * max(step_bytes(options, shape, stream, on_gpu) for stream in STREAMS)


def step_bytes(options: DictionaryOptions, shape: Shape, stream: str, on_gpu: bool) -> int:
    """Bytes of the largest step among a training batch, a validation batch and a k-means batch."""
    atoms, width, pairs = (
        options.atoms * shape.kv_heads,
        shape.head_dim // chunks(stream, options),
        sparsity(stream, options),
    )
    heldout = options.heldout_samples * chunks(stream, options) * (shape.layers if on_gpu else 1)
    like = torch.empty(0, device="meta" if on_gpu else "cpu")
    found = [FLOAT * atoms * min(max(BATCH, 4 * atoms), TILE_ELEMENTS // atoms)]
    for vectors in (options.batch_size, heldout):
        gram = FLOAT * atoms**2 if gram_is_cheaper(vectors, atoms, width, pairs) else 0
        # Correlations, their sizes, and a padded copy of those; the residual, what is approximated, the pairs.
        tile = 3 * FLOAT * atoms * min(vectors, tile_rows(like, atoms))
        found.append(gram + tile + vectors * (2 * FLOAT * width + 12 * pairs))
    return max(found)
