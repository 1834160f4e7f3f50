"""What a fit captures, in how many passes over the corpus, and the largest corpus that it may have."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from calib.capture.corpus import Corpus
from calib.capture.data import GENERATED, CaptureData
from calib.fit.calibration import Calibration
from calib.fit.stage import Stage
from calib.plan.meta_model import MetaModel
from calib.plan.meta_tensors import META, MetaTensors
from calib.runtime.messages.dtype_name import dtype_name


@dataclass(frozen=True)
class Sizes:
    """Sizes of the corpus.

    Attributes:
        length: tokens of a sequence.
        train: sequences of the training part.
        heldout: sequences of the held-out part.
        batch: sequences of a batch, for each process.
        processes: processes that share the sequences.
        positions: number of positions that the sequences are spread over; None if they start at 0.
    """

    length: int
    train: int
    heldout: int
    batch: int
    processes: int = 1
    positions: int | None = None

    @staticmethod
    def of(data: CaptureData, meta_model: MetaModel, processes: int) -> "Sizes":
        """The requested sizes, limited to the model's positions; a text may hold fewer sequences."""
        length = min(data.length, meta_model.longest or data.length)
        positions = data.positions and min(data.positions, meta_model.longest or data.positions)
        return Sizes(length, data.sequences, data.heldout_sequences, data.batch_size, processes, positions)

    def corpus(self, data: CaptureData) -> Corpus:
        """Returns a corpus of these sizes without text, whose `origin` has the same entries as the real corpus's."""
        blank = torch.zeros(1, 1, dtype=torch.int64)
        source, digest = data.source, "0" * 64
        origin: dict[str, Any] = {"name": source.label, "sha256": digest}
        if not source.text and source.name == GENERATED:
            origin = {"name": GENERATED}
        elif not source.text and data.heldout_split:
            heldout = replace(source, split=data.heldout_split)
            origin |= {"heldout": heldout.label, "heldout_sha256": digest}
        if own := data.own_sequences:
            origin["sampled"] = own
        if self.positions is not None:
            origin["positions"] = self.positions
        counts = {"length": self.length, "sequences": self.train, "heldout_sequences": self.heldout}
        origin |= {**counts, "tokens": self.train * self.length, "tokens_sha256": digest}
        return Corpus(blank.expand(self.train, self.length), blank.expand(self.heldout, self.length), origin)


@dataclass(frozen=True)
class Pass:
    """A stage's pass over a part of the corpus.

    Attributes:
        stage: the fit's stage.
        sequences: number of sequences that the pass reads, over all processes.
        batches: number of batches of one process.
        saves: number of checkpoints that the pass writes.
        statistics: names of the statistics that the pass fills.
    """

    stage: Stage
    sequences: int
    batches: int
    saves: int
    statistics: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "stage": self.stage.name,
            "part": self.stage.part,
            "sequences": self.sequences,
            "batches": self.batches,
            "checkpoints": self.saves,
            "statistics": list(self.statistics),
        }


def passes(calibration: Calibration, sizes: Sizes) -> list[Pass]:
    """Returns the passes of all stages that read the corpus, in order."""
    found = []
    for stage in calibration.stages():
        sequences = sizes.train if stage.part == "train" else sizes.heldout
        if (limit := calibration.limits.get(stage.name)) is not None:
            sequences = min(sequences, limit)
        batches = -(-sequences // (sizes.batch * sizes.processes))
        saves = batches // calibration.checkpoint_batches + 1
        found.append(Pass(stage, sequences, batches, saves, calibration.fills(stage)))
    return found


def statistics(calibration: Calibration, meta_model: MetaModel) -> dict[str, dict[str, Any]]:
    """Returns, for every statistic, its `tensors` while fitting, all layers (`[{"shape", "dtype", "count"}]`), and their
    `bytes`."""
    whole = prepared(calibration, meta_model)
    found: dict[str, dict[str, Any]] = {}
    for name, statistic in whole.statistics.items():
        kinds: dict[tuple[tuple[int, ...], str], int] = {}
        for buffer in statistic.buffers():
            kind = (tuple(buffer.shape), dtype_name(buffer.dtype))
            kinds[kind] = kinds.get(kind, 0) + 1
        found[name] = {
            "bytes": sum(buffer.nbytes for buffer in statistic.buffers()),
            "tensors": [{"shape": list(shape), "dtype": dtype, "count": n} for (shape, dtype), n in kinds.items()],
        }
    return found


def prepared(calibration: Calibration, meta_model: MetaModel) -> Calibration:
    """Returns a copy of `calibration` with the statistics of the whole model on the `meta` device."""
    whole = copy.deepcopy(calibration)
    with MetaTensors(), META:
        whole.prepare(meta_model.model, seed=0)
    return whole
