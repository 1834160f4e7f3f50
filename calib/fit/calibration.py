"""The LightningModule of a fit: it passes each captured batch to the statistics of the running stage."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from calib.capture.batches import CapturedBatch
from calib.capture.device_map import DeviceMap, MaxMemory
from calib.capture.language_model import check_dtype
from calib.capture.output_projection import output_weights
from calib.capture.sample import LayerSample
from calib.capture.shape import Shape
from calib.errors import UsageError
from calib.fit.stage import NON_UNIFORM, ROTATIONS, SENSITIVITY, STAGES, STORAGE, TRANSFORMS, Stage
from calib.neural_dict.options import DictionaryOptions
from calib.runtime.rotation import Rotation
from calib.statistics.attention_rotation import AttentionRotations
from calib.statistics.balancer import Balancers
from calib.statistics.channel_range import ChannelRanges
from calib.statistics.channel_scale import ChannelScales
from calib.statistics.clip import BITS, FACTORS, ClipFactors
from calib.statistics.components import Components
from calib.statistics.contract import Statistic, check_shape
from calib.statistics.heldout_error import HeldoutError
from calib.statistics.nuq_levels import NuqLevels
from calib.statistics.nuq_ranges import NuqRanges
from calib.statistics.outlier_thresholds import SHARES, OutlierThresholds
from calib.statistics.query_energy import QueryEnergy
from calib.statistics.residual_basis import BITS as RESIDUAL_BITS
from calib.statistics.residual_basis import FORMS, RANK, ResidualBasis
from calib.statistics.second_moments import SecondMoments
from calib.statistics.sensitivity import Sensitivity
from calib.statistics.storage_codes import StorageCodes
from calib.statistics.transform_basis import bases, errors_weight
from calib.statistics.transformed_streams import rotation_of
from calib.statistics.vector_samples import VectorSamples


class Calibration(LightningModule):
    """Holds all statistics of a fit; its checkpoint has their buffers and no weights of the language model.

    Nothing is optimised: optimisation is manual and there is no optimizer. All results of a stage are in the buffers
    of its statistics.

    Args:
        path: the model to measure, a local folder or a name on the Hugging Face hub.
        dtype: the dtype it runs in: `float32`, `bfloat16` or `float16`. Statistics are always computed in float32.
        device_map: accelerate's device map for a model too large for one device: `auto`, `balanced`, `balanced_low_0` or
            `sequential`; null puts the model on the Trainer's device, where statistics and dictionaries always are.
        max_memory: memory that the map may use of each GPU, by its number, and of the host, such as {0: 10GiB, cpu: 60GiB};
            weights beyond that are read from the model's files each time they are needed.
        bits: bit widths for which clip factors are chosen, increasing, 1 to 8.
        clip_factors: candidates for the clip factor, decreasing from 1; more of them cost time in proportion.
        clip_sequences: how many of `data.sequences` are used to choose clip factors, residual bases and the steps of `klt`,
            which take far more time than ranges; null for all.
        klt: measure what the method `klt` needs. Memory throughout the fit: ten float64 tensors [layers, kv_heads, head_dim,
            head_dim] and its components' errors, 1.9 GB for Llama 2 7B.
        sensitivity_sequences: on how many of `data.sequences` the model is differentiated, to weigh the errors of `klt` (and,
            with `nuq`, of `kvquant`); null for all, 0 for none: then queries and output projections alone give the weights.
        storage: fit what stored chunks need for the profile "storage" (`Codec`); needs `klt`. Memory throughout the fit: 12,288
            tokens of keys and values in the model's dtype, 1.6 GB for Llama 3 8B.
        nuq: shares of outliers for which the levels of `kvquant` are fitted, increasing from 0, such as [0.01]; empty for none.
            They need derivatives of the model on `sensitivity_sequences`, and memory throughout the fit: 2,048 tokens of keys
            in float32, 1.1 GB for Llama 2 7B.
        rotations: measure what the method `oscar` needs: two float64 tensors [layers, kv_heads, head_dim, head_dim] throughout
            the fit, 134 MB each for Llama 2 7B, and attention computed once more over every sequence.
        query_rows: query rows of each sequence on which attention errors are measured.
        outlier_shares: shares of outliers for which thresholds are taken, increasing, above 0 and below 1.
        residual_bits: bit widths of the quantisers to whose residuals bases are fitted, increasing, 1 to 8; a basis helps
            little at another width, except a basis of keys in groups of one channel.
        residual_rank: vectors of each residual basis, at most head_dim.
        residual_forms: quantisers to whose residuals bases are fitted: lists `keys` and `values` of group sizes, tokens x
            channels, such as "*x1" or 1x64; half is 1x(head_dim / 2). A stream with an empty list, or without one, has no
            bases and costs nothing. Each form and width takes one float64 tensor [layers, kv_heads, head_dim, head_dim]
            throughout the fit: 134 MB each for Llama 2 7B.
        dictionary: options of the layer groups and sparse dictionaries.
        checkpoint_batches: batches between checkpoints within a stage.
    """

    def __init__(
        self,
        path: str,
        dtype: str = "float32",
        device_map: DeviceMap | None = None,
        max_memory: MaxMemory | None = None,
        bits: list[int] = list(BITS),  # noqa: B006  (read only; a factory would hide the default from --help)
        clip_factors: list[float] = list(FACTORS),  # noqa: B006
        clip_sequences: int | None = 32,
        klt: bool = True,
        sensitivity_sequences: int | None = 16,
        storage: bool = False,
        rotations: bool = False,
        nuq: list[float] = [],  # noqa: B006
        query_rows: int = 32,
        outlier_shares: list[float] = list(SHARES),  # noqa: B006
        residual_bits: list[int] = list(RESIDUAL_BITS),  # noqa: B006
        residual_rank: int = RANK,
        residual_forms: dict[str, list[str]] = {stream: list(names) for stream, names in FORMS.items()},  # noqa: B006, B008
        dictionary: DictionaryOptions = DictionaryOptions(),  # noqa: B008  (frozen)
        checkpoint_batches: int = 8,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        for option, value, least in (
            ("clip_sequences", clip_sequences, 1),
            ("sensitivity_sequences", sensitivity_sequences, 0),
            ("checkpoint_batches", checkpoint_batches, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"model.{option}={value}: must be at least {least}")
        self.path, self.dtype_name = path, check_dtype(dtype)
        self.device_map, self.max_memory = device_map, max_memory
        self.bits, self.clip_factors, self.query_rows = tuple(bits), tuple(clip_factors), query_rows
        self.limits = {"clip": clip_sequences, SENSITIVITY: sensitivity_sequences}
        self.klt, self.rotations, self.checkpoint_batches = klt, rotations, checkpoint_batches
        self.storage = storage
        self.outlier_shares, self.nuq = tuple(outlier_shares), tuple(nuq)
        self.residual_bits, self.residual_rank = tuple(residual_bits), residual_rank
        self.residual_forms = {stream: tuple(names) for stream, names in residual_forms.items()}
        self.dictionary = dictionary
        # The constructors check these options; any shape will do, and an error comes before the model is loaded.
        ClipFactors(Shape(1, 1, 1, 32), self.bits, self.clip_factors, query_rows)
        OutlierThresholds(Shape(1, 1, 1, 1), 0, self.outlier_shares)
        NuqRanges(Shape(1, 1, 1, 1), 0, self.nuq, None)
        if storage and not klt:
            raise UsageError(
                "model.storage=True with model.klt=False: its bases weigh errors as those of klt; leave klt on"
            )
        if self.nuq and sensitivity_sequences == 0:
            raise UsageError(
                f"model.nuq={list(nuq)} with model.sensitivity_sequences=0: levels are weighted by derivatives; give some, 16 is "
                "the default"
            )
        ResidualBasis(Shape(1, 1, 1, 1), self.residual_bits, residual_rank, self.residual_forms)
        self.statistics = nn.ModuleDict()
        self.notes: list[str] = []  # lines to print for the user
        self.plan: dict[str, Any] = {}  # what the statistics depend on; a checkpoint must agree
        self.progress: dict[str, Any] = {"stage": STAGES[0].name, "seen": 0, "finished": False}

    def fills(self, stage: Stage) -> tuple[str, ...]:
        """Returns the names of the statistics that `stage` fills under the options of this fit."""
        without = () if self.dictionary.atoms else ("vectors", "heldout_vectors")
        without += TRANSFORMS if not self.klt else () if self.limits[SENSITIVITY] != 0 else (SENSITIVITY,)
        without += () if self.storage else (STORAGE,)
        without += () if self.rotations else (ROTATIONS,)
        without += () if self.nuq else NON_UNIFORM
        return tuple(name for name in stage.statistics if name not in without)

    def stages(self) -> list[Stage]:
        """Returns the stages of this fit, in order."""
        return [stage for stage in STAGES if self.fills(stage)]

    def round_after(self, measured: Collection[str]) -> list[Stage]:
        """Returns the next stages that each shard can run alone: up to the first that needs merged statistics of these stages.

        Args:
            measured: names of the stages whose statistics are complete.
        """
        found: list[Stage] = []
        filled: set[str] = set()
        for stage in self.stages():
            if stage.name in measured:
                continue
            if filled & {*stage.needs, *stage.made_of}:
                break
            found.append(stage)
            filled |= {*self.fills(stage)}
        return found

    def prepare(self, model: PreTrainedModel, seed: int) -> None:
        """Creates the statistics for the model's sizes; called once, before the first stage.

        `seed` chooses the random samples of tokens.
        """
        self.shape, self.seed = Shape.of(model), seed
        self.statistics["channel_range"] = ChannelRanges(self.shape)
        self.statistics["channel_scale"] = ChannelScales(self.shape)
        self.statistics["balancer"] = Balancers(self.shape)
        self.statistics["query_energy"] = QueryEnergy(self.shape)
        self.statistics["outlier_thresholds"] = OutlierThresholds(self.shape, seed, self.outlier_shares)
        self.statistics["clip"] = ClipFactors(self.shape, self.bits, self.clip_factors, self.query_rows)
        self.statistics["residual_basis"] = ResidualBasis(
            self.shape, self.residual_bits, self.residual_rank, self.residual_forms
        )
        self.statistics["heldout"] = HeldoutError(self.shape, self.bits, self.query_rows)
        if self.dictionary.atoms:
            rotation = partial(Rotation.of, model, "fit without dictionaries: --model.dictionary.atoms 0")
            for name, capacity in (
                ("vectors", self.dictionary.samples),
                ("heldout_vectors", self.dictionary.heldout_samples),
            ):
                self.statistics[name] = VectorSamples(self.shape, seed, capacity, model.dtype, rotation)

        if self.rotations:
            self.statistics[ROTATIONS] = AttentionRotations(self.shape)
        if self.klt:
            self.prepare_transforms(model)
        if self.nuq:
            turn = Rotation.of(model, "fit without --model.nuq")
            ranges = NuqRanges(self.shape, seed, self.nuq, turn)
            self.statistics["nuq_ranges"], self.statistics["nuq_levels"] = ranges, NuqLevels(self.shape, ranges, turn)

    def prepare_transforms(self, model: PreTrainedModel) -> None:
        """Creates the statistics of `klt`; each is computed from the ones before it."""
        rotation, (output, unread) = rotation_of(model), output_weights(model, self.shape)
        if unread:
            self.notes.append(
                f"layers {unread} have no output projection that can be read: errors of their values weigh the same in all "
                "directions"
            )
        moments, sensitivity = SecondMoments(self.shape, rotation), None
        self.statistics["second_moments"] = moments
        if self.limits[SENSITIVITY] != 0:
            self.statistics[SENSITIVITY] = sensitivity = Sensitivity(self.shape, rotation)
        find = partial(bases, moments, sensitivity, output)
        self.statistics["components"] = Components(self.shape, rotation, find)
        if self.storage:
            turn = Rotation.of(model, "fit without --model.storage")
            weigh = partial(errors_weight, moments, sensitivity, output)
            self.statistics[STORAGE] = StorageCodes(self.shape, self.seed, model.dtype, turn, weigh)

    def begin(self, stage: Stage, seen: int = 0, first: bool = True) -> None:
        """Sets `stage` as the running stage.

        Args:
            stage: a stage of this fit.
            seen: batches of each process that the statistics hold already, from a checkpoint.
            first: whether this is the process of rank 0. It alone keeps what a checkpoint holds; the others start empty.
        """
        self.stage = stage
        self.progress = {"stage": stage.name, "seen": seen, "finished": False}
        if not first:
            self.clear()
        fitted = self.tensors(stage.needs)
        for name in self.filled():
            for attribute in ("ranges", "fitted"):
                if hasattr(self.statistics[name], attribute):
                    setattr(self.statistics[name], attribute, fitted)

    def filled(self) -> tuple[str, ...]:
        """Returns the names of the statistics that the running stage fills."""
        return self.fills(self.stage)

    def statistic(self, name: str) -> Statistic:
        """Returns the statistic of this name."""
        found = self.statistics[name]
        assert isinstance(found, Statistic)
        return found

    def tensors(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Returns the artifact's tensors that the named statistics give, by tensor name."""
        return {name: tensor for one in names for name, tensor in self.statistic(one).tensors().items()}

    def observe(self, sample: LayerSample) -> None:
        """Passes one layer's sample to every statistic of the running stage; the sink of a capture."""
        check_shape(sample, self.shape)
        for name in self.filled():
            self.statistic(name).observe(sample)

    def training_step(self, batch: CapturedBatch, batch_idx: int) -> None:
        """Runs the model over one batch; each layer's sample goes to the statistics as the forward pass reaches it."""
        if self.stage.name == SENSITIVITY:
            for reason in set(batch.stream_gradients(self.seed, self.observe)):
                self.notes.append(
                    f"{reason}: these sequences add nothing to the weights of errors, on which klt and kvquant depend"
                )
        else:
            batch.stream(self.observe)
        self.progress["seen"] += 1
        figures = {"sequences": float(self.progress["seen"] * len(batch)), **self.running_errors()}
        self.log_dict(
            {f"{self.stage.name}/{name}": figure for name, figure in figures.items()},
            on_step=True,
            on_epoch=False,
            batch_size=max(1, len(batch)),
        )

    def running_errors(self) -> dict[str, float]:
        """Returns, in the last stage, the relative errors so far over all layers, by names such as `error_2bit_clipped`."""
        if "heldout" not in self.stage.statistics:
            return {}
        heldout = self.statistics["heldout"]
        assert isinstance(heldout, HeldoutError)
        return heldout.named(heldout.overall())

    def merge(self, device: torch.device) -> None:
        """Merges this stage's statistics over all processes, so that each holds the merged ones; exchanged on `device`."""
        if distributed.is_available() and distributed.is_initialized():
            for name in self.filled():
                self.statistic(name).synchronise(device)

    def clear(self) -> None:
        """Resets the statistics that this stage fills."""
        for name in self.filled():
            self.statistic(name).clear()

    def gather(self, device: torch.device) -> None:
        """Merges the statistics of all processes into the first one, which writes the checkpoint, and resets the others'.

        `begin` does the same when a run resumes, so sums are added in the same order as in an uninterrupted run.
        """
        self.merge(device)
        if not self.trainer.is_global_zero:
            self.clear()

    def on_train_end(self) -> None:
        """Ends the stage: every process gets the merged statistics."""
        self.merge(self.trainer.strategy.root_device)
        self.progress["finished"] = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the stage's progress and the settings that its statistics depend on."""
        checkpoint["calibration"], checkpoint["plan"] = dict(self.progress), dict(self.plan)

    def configure_optimizers(self) -> None:
        """Returns no optimizer: nothing is optimised."""
