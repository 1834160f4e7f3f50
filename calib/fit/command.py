"""Runs `calib fit` and `calib merge`: loads the model, runs the stages, writes the artifact or a shard, prints the figures."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedModel

from calib.capture.corpus import Corpus
from calib.capture.data import CaptureData
from calib.capture.shard import WHOLE, Shard
from calib.errors import UsageError
from calib.fit.calibration import Calibration
from calib.fit.dictionaries import fit_dictionaries
from calib.fit.dictionary_tasks import check_dictionaries
from calib.fit.head_losses import factors, head_losses, reweighted
from calib.fit.loss_curve import BITS, loss_curve
from calib.fit.metrics import fit_metrics
from calib.fit.options import FitCLI
from calib.fit.provenance import provenance, settings, versions
from calib.fit.shard_file import ShardFile
from calib.fit.shards import Round, arrange, base_of, in_words, merge_shards, stages_of, write_shard
from calib.fit.stage import Stage
from calib.fit.stages import run_stages
from calib.fit.table import print_groups, print_table
from calib.loggers import OfflineFirstWandbLogger, TableCSVLogger
from calib.output_check import check_file, check_folder
from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.fingerprint import fingerprint
from calib.runtime.files import canonical_json

GROUP = 32  # channels that share parameters, by default of `kivi`


def fit(cli: FitCLI, calibration: Calibration, data: CaptureData) -> None:
    """Runs a whole fit: loads the model, runs the stages, writes the artifact (or the shard) and prints the figures."""
    output, folder, seed = Path(cli.config.output), cli.folder, int(cli.config.seed_everything)
    check_outputs(cli)
    resume = cli.config.ckpt_path == "last"
    if resume and not list(folder.glob("*.ckpt")):
        say(f"calib: no unfinished run in {folder}; starting anew")
    say(f"fit of {data.model_path} on {data.source.label}; writes {output}, and its run into {folder}")
    rounds = arrange(calibration, [ShardFile.open(path) for path in cli.shards])
    stages = left_to_run(cli.shard, calibration, rounds)  # may raise, so it comes before a large model is loaded
    data.trainer, data.tell = cli.trainer, under_way
    model, _, corpus = data.load()
    config = settings(calibration, corpus, seed, data.batch_size)
    identity = fingerprint(model)
    calibration.prepare(model, seed)
    tell([*data.notes, *calibration.notes])
    calibration.notes.clear()
    if calibration.dictionary.atoms:
        check_dictionaries(calibration.dictionary, calibration.shape, corpus.train.numel())
    for logger in cli.trainer.loggers:
        logger.log_hyperparams(config)
    save_config(cli, folder)
    shared = {
        **flat(config),
        "weights": identity["weights"]["float32"],
        "config_hash": identity["config_hash"],
    }
    if rounds:
        under_way(f"merging {len(cli.shards)} files")
    merge_shards(calibration, rounds, canonical_json.plain(shared, "settings"))
    plan = {
        **shared,
        **{f"version of {name}": version for name, version in versions().items()},
        "trainer.devices": cli.trainer.world_size,
        **({"shard": str(cli.shard)} if cli.shard else {}),
        **({"base": base_of(rounds)} if rounds else {}),
    }
    data.shard = cli.shard or WHOLE
    run_stages(calibration, data, cli.stage_trainer, folder, plan, resume, stages)
    tell(calibration.notes)
    if cli.shard:
        report_shard(cli, calibration, stages, canonical_json.plain(shared, "settings"), base_of(rounds))
        return
    if calibration.dictionary.atoms:
        under_way("comparing layers for their dictionaries")
    dictionaries = fit_dictionaries(calibration, cli.stage_trainer, folder, plan, seed, resume)
    metrics = fit_metrics(calibration, dictionaries)
    tensors = calibration.tensors(tuple(calibration.statistics)) | dictionaries.tensors
    artifact = Artifact(tensors, identity, provenance(config, metrics), calibration.bits)
    if calibration.klt:
        under_way("measuring the loss of klt head by head")
        artifact = with_losses(artifact, model, corpus)
    report(cli, artifact, metrics, output, calibration)


@rank_zero_only
def check_outputs(cli: FitCLI) -> None:
    """Raises UsageError if the artifact or the run's folder could not be written at the end."""
    check_file("output", cli.config.output)
    check_folder("trainer.default_root_dir", cli.folder)


def left_to_run(shard: Shard | None, calibration: Calibration, rounds: Sequence[Round]) -> list[Stage]:
    """Returns the stages that no shard has measured; for a shard, those of them that it can run alone.

    Raises UsageError if none are left for the shard.
    """
    measured = stages_of(rounds)
    if shard is None:
        return [stage for stage in calibration.stages() if stage.name not in measured]
    found = calibration.round_after(measured)
    if not found:
        raise UsageError(f"shard={shard}: these files have every stage; leave it out, and the artifact is written")
    return found


def with_losses(artifact: Artifact, model: PreTrainedModel, corpus: Corpus) -> Artifact:
    """Returns the artifact with each head's `klt` errors reweighted by measured losses, and with the loss curve of `klt`.

    If the model cannot be run with a compressed cache, print one line instead.
    """
    try:
        found = factors(*head_losses(model, artifact, corpus.train))
        artifact = replace(artifact, tensors={**artifact.tensors, **reweighted(artifact, found)})
        under_way(f"measuring the loss of klt at {len(BITS)} budgets")
        curve = loss_curve(model, artifact, corpus.heldout)
    except ValueError as error:
        say(
            f"calib: the loss of klt was not measured, so klt cannot take `loss` with this artifact: {' '.join(str(error).split())}"
        )
        return artifact
    return replace(artifact, tensors={**artifact.tensors, **curve})


@rank_zero_only
def report(cli: FitCLI, artifact: Artifact, metrics: dict[str, Any], output: Path, calibration: Calibration) -> None:
    """Writes the artifact, logs its figures and the file, and prints the tables."""
    artifact.save(output)
    for logger in cli.trainer.loggers:
        logger.log_metrics({f"fit/{name}": value for name, value in metrics["overall"].items()})
        if isinstance(logger, OfflineFirstWandbLogger | TableCSVLogger):
            for name in ("layers", "dictionaries"):
                if found := metrics.get(name):
                    # A column of a logged table has one type of value, so a list of layers becomes text.
                    rows = [[str(x) if isinstance(x, list) else x for x in row.values()] for row in found]
                    logger.log_table(f"fit/{name}", list(found[0]), rows)
            logger.log_file(output, "calibration")
            logger.close()
    print_table(metrics, calibration.bits)
    if "dictionaries" in metrics:
        print_groups(metrics["dictionaries"])
    size = os.path.getsize(output)
    print(f"wrote {output} ({size / 1e3:.1f} kB, {len(artifact.tensors)} tensors); figures in {cli.folder}")
    tell_checkpoints(cli)
    print(f"next: {first_look(calibration.path, output, calibration.shape.head_dim)}")


def first_look(model: str, artifact: Path, head_dim: int) -> str:
    """Returns a command that generates with the artifact, with a smaller group where `kivi`'s own does not divide head_dim."""
    words = ["calib", "generate", "--model", model, "--artifact", str(artifact), "--method", "kivi", "--bits", "2"]
    group = math.gcd(GROUP, head_dim)
    return shlex.join(words if group == GROUP else [*words, "--group", str(group)])


@rank_zero_only
def report_shard(
    cli: FitCLI, calibration: Calibration, stages: Sequence[Stage], shared: Mapping[str, Any], base: str
) -> None:
    """Writes the shard's file and prints the next command."""
    assert cli.shard is not None
    output, names = Path(cli.config.output), [stage.name for stage in stages]
    write_shard(calibration, output, cli.shard, stages, shared, base)
    for logger in cli.trainer.loggers:
        if isinstance(logger, OfflineFirstWandbLogger | TableCSVLogger):
            logger.close()
    print(f"wrote {output} ({os.path.getsize(output) / 1e6:.1f} MB: shard {cli.shard}, {in_words(names)})")
    tell_checkpoints(cli)
    print(f"next: calib merge with the {cli.shard.count} shards' files of {in_words(names)}, and the same options")


def tell_checkpoints(cli: FitCLI) -> None:
    """Prints which checkpoints are left in the run's folder, their size and their use."""
    if left := sorted(cli.folder.glob("*.ckpt")):
        taken = sum(path.stat().st_size for path in left)
        print(
            f"left in {cli.folder}: {', '.join(path.name for path in left)} ({taken / 1e6:.1f} MB); only --ckpt_path last reads "
            f"them, {cli.config.output} does not need them"
        )


def tell(notes: list[str]) -> None:
    """Prints each note once."""
    for note in dict.fromkeys(notes):
        say(f"calib: {note}")


def under_way(what: str) -> None:
    """Announces a phase that has no progress bar."""
    say(f"calib: {what} ...")


@rank_zero_only
def say(line: str) -> None:
    """Prints one line, from the first process only; flushed, so that a log shows it at once."""
    print(line, flush=True)


@rank_zero_only
def save_config(cli: FitCLI, folder: Path) -> None:
    """Writes the resolved configuration into the run's folder, without `ckpt_path`: it repeats the run from the start."""
    folder.mkdir(parents=True, exist_ok=True)
    config = cli.config.clone()
    config.ckpt_path = None
    cli.parser.save(config, folder / "config.yaml", overwrite=True, multifile=False)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under dotted names, so that messages can name the one that differs."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result
