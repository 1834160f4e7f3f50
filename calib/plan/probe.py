"""Times one piece of each kind of a fit's work on this machine, with the model's own shapes and random numbers.

The timed piece starts at 32 tokens and grows until it is a whole batch or the next one would exceed the time budget, because
small pieces are mostly overhead. Statistics that try bit widths and clip factors try a few of them. Dictionaries are timed by
steps of full size. `duration.py` extrapolates from these timings.
"""

import copy
import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.capture import stream
from calib.capture.gradients import stream_gradients
from calib.capture.sample import LayerSample
from calib.fit.calibration import Calibration
from calib.fit.dictionary_tasks import chunks, sparsity
from calib.fit.stage import SENSITIVITY
from calib.layer_groups.divergence import histogram_divergence, moments_of, principal_axes
from calib.neural_dict.centroids import PASSES, nearest_centres, unit_rows
from calib.neural_dict.dictionary import NeuralDictionary, Task
from calib.neural_dict.module import NeuralDictionaries
from calib.plan.capture_cost import Sizes
from calib.plan.meta_model import MetaModel, with_rotary_embeddings
from calib.runtime.artifact.tensor_registry import STREAMS
from calib.side_by_side import side_by_side

FIRST, GROWTH = 32, 4  # tokens of the first piece, and factor by which pieces grow
STEPS, LONG = 32, 0.3  # most training steps that are timed, and about how many seconds they take
VECTORS = 512  # vectors of a timed validation
TRIED = 2  # clip factors that are tried
SHORT, MOST = 0.1, 5  # a timing is repeated until so many seconds or repetitions are reached
WRITTEN = 2**25  # bytes of the timed checkpoint


@dataclass
class Pace:
    """Seconds of pieces of work.

    Attributes:
        tokens: tokens of the piece that `forward` and `observe` refer to (sequences x length).
        length: tokens of a sequence of that piece.
        forward: the forward of one layer of the model.
        observe: by statistic, observing one layer's sample. For statistics that read derivatives, the first one has the whole time
            of differentiating a layer beyond its forward, and the others have 0.
        finish: by statistic, computing one layer's tensors.
        step: by stream, one training step of a dictionary. This and the next two are timed with as many dictionaries in parallel as
            in the fit, and divided by their number.
        validation: by stream, one held-out vector.
        start: by stream, one vector in k-means, all passes.
        pair: comparing two layers.
        byte: writing one byte of a checkpoint.
    """

    tokens: int = 0
    length: int = 0
    forward: float = 0.0
    observe: dict[str, float] = field(default_factory=dict)
    finish: dict[str, float] = field(default_factory=dict)
    step: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    pair: float = 0.0
    byte: float = 0.0


def measured_pace(
    calibration: Calibration, meta_model: MetaModel, sizes: Sizes, device: torch.device, budget: float
) -> Pace:
    """Times all pieces on `device`; forwards and statistics take about `budget` seconds."""
    pace, devices = Pace(), [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        capture(pace, calibration, meta_model, sizes, device, budget)
        if calibration.dictionary.atoms:
            dictionaries(pace, calibration, meta_model, device)
    content = torch.zeros(WRITTEN, dtype=torch.uint8)
    pace.byte = seconds(lambda: torch.save(content, io.BytesIO()), torch.device("cpu")) / WRITTEN
    return pace


def capture(
    pace: Pace, calibration: Calibration, meta_model: MetaModel, sizes: Sizes, device: torch.device, budget: float
) -> None:
    """Times one layer's forward and every statistic, in growing pieces, and writes the seconds into `pace`."""
    model, one = random_layer(meta_model, device), copy.deepcopy(calibration)
    one.bits, one.residual_bits, one.clip_factors = one.bits[:1], one.residual_bits[:1], one.clip_factors[:TRIED]
    one.prepare(model, seed=0)
    one.to(device)
    size, whole = min(FIRST, sizes.length), sizes.batch * sizes.length
    piece(pace, one, model, 1, size, device)  # the first run takes longer
    end = time.perf_counter() + budget
    while True:
        piece(pace, one, model, max(1, size // sizes.length), min(size, sizes.length), device)
        next_piece = GROWTH * (pace.forward + sum(pace.observe.values()))
        if size >= whole or time.perf_counter() + next_piece > end:
            break
        size = min(GROWTH * size, whole)
        size = max(size // sizes.length * sizes.length, min(size, sizes.length))  # whole sequences
    widths = len(calibration.bits)
    tried = {
        "clip": widths * len(calibration.clip_factors) / len(one.clip_factors),
        "heldout": widths,
        "residual_basis": len(calibration.residual_bits),
    }
    for name in one.statistics:
        pace.observe[name] *= tried.get(name, 1)
        bases = tried[name] if name == "residual_basis" else 1  # one for every width
        pace.finish[name] = bases * seconds(one.statistic(name).tensors, device)


def piece(pace: Pace, one: Calibration, model: PreTrainedModel, batch: int, length: int, device: torch.device) -> None:
    """Times the forward and all statistics on `batch` random sequences of `length` tokens."""
    tokens = torch.randint(3, model.config.get_text_config(decoder=True).vocab_size, (batch, length), device=device)
    real, samples = torch.ones_like(tokens, dtype=torch.bool), list[LayerSample]()
    index = torch.arange(tokens.numel(), device=device).view_as(tokens)
    pace.tokens, pace.length = tokens.numel(), length
    pace.forward = seconds(lambda: stream(model, tokens, real, index, samples.append), device)
    for stage in one.stages():
        one.begin(stage)
        if stage.name == SENSITIVITY:
            work = partial(stream_gradients, model, tokens, real, index, 0, one.observe)
            first, *others = one.filled()
            pace.observe |= {first: max(0.0, seconds(work, device) - pace.forward), **dict.fromkeys(others, 0.0)}
            continue
        for name in one.filled():
            pace.observe[name] = seconds(partial(one.statistic(name).observe, samples[0]), device)


def dictionaries(pace: Pace, calibration: Calibration, meta_model: MetaModel, device: torch.device) -> None:
    """Times each stream's dictionaries, as many in parallel as the fit trains at once, since CPU threads slow each other down."""
    options, shape, at_once = calibration.dictionary, meta_model.shape, together(meta_model, device)
    atoms = options.atoms * shape.kv_heads
    for name in STREAMS:
        width = shape.head_dim // chunks(name, options)
        samples, heldout = torch.randn(max(atoms, options.batch_size), width), torch.randn(VECTORS, width)
        task = Task(name, samples, heldout, atoms, sparsity(name, options))
        module = NeuralDictionaries([task] * at_once, options, 0, {}).to(device)
        every = list(module.all())
        for one in every:
            one.losses.zero_()  # marks training as begun: k-means is timed separately
            one.atoms.data.copy_(unit_rows(samples[:atoms]))
            one.begin()
            one.begin_epoch()

        def taken(work: Callable[[NeuralDictionary], object], every: list[NeuralDictionary] = every) -> float:
            return seconds(lambda: side_by_side(work, every, device), device) / len(every)

        steps = max(1, min(STEPS, int(LONG / taken(trained))))
        pace.step[name] = taken(partial(trained, steps=steps)) / steps
        pace.validation[name] = taken(NeuralDictionary.validation_loss) / VECTORS
        pace.start[name] = taken(assigned) * PASSES / VECTORS
    vectors = torch.randn(shape.head_dim, options.samples)
    moments = moments_of(vectors.double())
    pace.pair = seconds(lambda: compared(vectors, moments), torch.device("cpu"))


def together(meta_model: MetaModel, device: torch.device) -> int:
    """Number of dictionaries that a process trains at once, of those of keys and values for every layer."""
    return min(torch.get_num_threads(), len(STREAMS) * meta_model.shape.layers) if device.type == "cpu" else 1


def trained(dictionary: NeuralDictionary, steps: int = 1) -> None:
    """Trains for several steps: dictionaries in parallel slow each other down, which a single step does not show."""
    for _ in range(steps):
        dictionary.train_batch(dictionary.samples[: dictionary.options.batch_size])


@torch.no_grad()
def assigned(dictionary: NeuralDictionary) -> None:
    """Finds the nearest centroid of every held-out vector, which is most of the work of k-means."""
    nearest_centres(dictionary.heldout, dictionary.atoms)


def compared(vectors: Tensor, moments: tuple[Tensor, Tensor]) -> float:
    """Computes the divergence of two layers that both have the same `vectors [d, V]` (d channels, V vectors)."""
    axes = principal_axes(moments, moments).float()
    return histogram_divergence(axes @ vectors, axes @ vectors)


def random_layer(meta_model: MetaModel, device: torch.device) -> PreTrainedModel:
    """Returns a one-layer model on `device` with random weights."""
    model = meta_model.one_layer().to_empty(device=device)
    for part in model.parameters():
        # Random numbers are repeated, since drawing every entry would take longer than the work that is timed.
        drawn = torch.randn(min(part.numel(), 2**16), device=device) / math.sqrt(part.shape[-1])
        part.data.view(-1).copy_(drawn.repeat(-(-part.numel() // len(drawn)))[: part.numel()])
    for buffer in model.buffers():
        buffer.fill_(1)
    with_rotary_embeddings(model, device)
    return model


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `work()`, including its work on the device; short work is repeated and averaged."""
    settle(device)
    began, times = time.perf_counter(), 0
    while times < MOST and time.perf_counter() - began < SHORT:
        work()
        settle(device)
        times += 1
    return (time.perf_counter() - began) / times


def settle(device: torch.device) -> None:
    """Waits until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
