"""A fit on many machines that exchange only files: each measures a shard, and shards are merged like the processes of DDP.

A round is the stages that a shard can run alone. The first has ranges, moments and derivatives; the second needs the merged result
of the first for clip factors and components; the third has the held-out errors. Minima, maxima, counts and samples equal those of
a fit on one machine bit for bit; sums are float64, added in the order of the shards' numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from calib.capture.shard import Shard
from calib.errors import UsageError
from calib.fit import shard_file
from calib.fit.calibration import Calibration
from calib.fit.provenance import versions
from calib.fit.shard_file import SIGNATURE, ShardFile
from calib.fit.stage import Stage
from calib.runtime.files import canonical_json
from calib.runtime.messages.printable import printable
from calib.statistics.components import Components

# Largest difference, relative to a head's largest entry, between the bases that two machines compute from the same sums. Rounding
# differences below it change quantisation errors as little. If two components have nearly equal variance, another processor may
# return other eigenvectors or another order: the difference is then about 1, and errors of the two must not be summed.
SAME_BASES = 1e-3
LISTED = 8  # shards in a message


@dataclass(frozen=True)
class Round:
    """The shard files of one round.

    Attributes:
        stages: the stages that every shard of the round ran.
        files: one for each shard, in the order of their numbers.
    """

    stages: tuple[Stage, ...]
    files: tuple[ShardFile, ...]


def arrange(calibration: Calibration, files: Sequence[ShardFile]) -> list[Round]:
    """Returns the files, given in any order, sorted into rounds. Reads only their metadata and needs no model.

    Raises UsageError, naming the file, unless every round is complete, was measured after the same earlier rounds, and with
    these versions of the software.
    """
    rounds: list[Round] = []
    left = list(files)
    for file in left:
        check_same(file, "version of ", file.document["versions"], versions())
    while left:
        stages = calibration.round_after(stages_of(rounds))
        names = [stage.name for stage in stages]
        mine = [file for file in left if file.document["stages"] == names]
        if not mine:
            wanted = f"need {in_words(names)} first, of which no shard is given" if names else "have no such stage"
            raise UsageError(f"{left[0].path}: has {in_words(left[0].document['stages'])}, but these options {wanted}")
        for file in mine:
            left.remove(file)
            if file.document["base"] != base_of(rounds):
                raise UsageError(
                    f"{file.path}: {in_words(names)} was measured after other shards than those given here; give those that it "
                    "was given, or measure it again"
                )
        rounds.append(Round(tuple(stages), complete(mine, in_words(names))))
    return rounds


def stages_of(rounds: Sequence[Round]) -> list[str]:
    """Returns the names of the stages of these rounds."""
    return [stage.name for one in rounds for stage in one.stages]


def base_of(rounds: Sequence[Round]) -> str:
    """Returns a hash of the metadata of all files (with the SHA-256 of their buffers), stored in later rounds; "" for no rounds."""
    return canonical_json.sha256([[file.document for file in one.files] for one in rounds]) if rounds else ""


def merge_shards(calibration: Calibration, rounds: Sequence[Round], settings: Mapping[str, Any]) -> None:
    """Merges the shards' statistics into those of `calibration`, with one statistic of one shard in memory at a time.

    Args:
        calibration: prepared for the model, with empty statistics.
        rounds: as `arrange` returns them.
        settings: all settings that the statistics depend on, as plain JSON; the shards' must be equal.

    Raises UsageError, naming the file and its fault.
    """
    for file in [file for one in rounds for file in one.files]:
        check_same(file, "", file.document["settings"], settings)
    for one in rounds:
        for name in [name for stage in one.stages for name in calibration.fills(stage)]:
            statistic = calibration.statistic(name)
            for file in one.files:
                statistic.merge_buffers(file.buffers(name, dict(statistic.named_buffers())))
            if isinstance(statistic, Components):
                check_bases(statistic.signature(), one.files)


def check_same(file: ShardFile, kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError, naming the first difference, if the shard's settings or versions `before` differ from `now`."""
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise UsageError(
                f"{file.path}: was measured with {kind}{printable(key)[1:-1]} = {printable(before.get(key))}, here it is "
                f"{printable(now.get(key))}: shards and their merge need the same model, text, settings and versions"
            )


def complete(files: Sequence[ShardFile], stages: str) -> tuple[ShardFile, ...]:
    """Returns the files in the order of their numbers; raises UsageError unless shards 1 ... N of the same N are given once
    each."""
    found: dict[int, ShardFile] = {}
    first = files[0]
    for file in files:
        shard, count = file.shard, first.shard.count
        if shard.count != count:
            raise UsageError(
                f"{first.path} is shard {first.shard} of {stages} and {file.path} is {shard}: give shards of one division"
            )
        if shard.number in found:
            raise UsageError(
                f"{found[shard.number].path} and {file.path} are both shard {shard} of {stages}: give each once"
            )
        found[shard.number] = file
    missing = [str(Shard(number, count)) for number in range(1, count + 1) if number not in found]
    if missing:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        raise UsageError(
            f"shard {', '.join(missing[:LISTED])}{more} of {stages} is missing: {len(found)} of {count} are given"
        )
    return tuple(found[number] for number in sorted(found))


def check_bases(mine: Tensor, files: Sequence[ShardFile]) -> None:
    """Raises UsageError if a shard's `klt` bases differ from those that this machine computes from the same sums.

    `mine` is the signature of the bases here (`Components.signature`).
    """
    for file in files:
        theirs = file.tensor(SIGNATURE, mine)
        apart = float(((theirs - mine).abs().amax(-1) / mine.abs().amax(-1)).max())
        if not apart <= SAME_BASES:
            raise UsageError(
                f"{file.path}: was measured in bases of klt that differ by {apart:.1e} from those made here of the same "
                f"statistics, at most {SAME_BASES:.0e} is allowed: measure and merge on processors of one kind"
            )


def write_shard(
    calibration: Calibration,
    path: Path,
    shard: Shard,
    stages: Sequence[Stage],
    settings: Mapping[str, Any],
    base: str,
) -> None:
    """Writes the statistics that `stages` fill, as a shard's file. Raises RunError if it cannot be written."""
    names = [name for stage in stages for name in calibration.fills(stage)]
    components = [one for one in map(calibration.statistic, names) if isinstance(one, Components)]
    shard_file.write(
        path,
        {
            "shard": str(shard),
            "stages": [stage.name for stage in stages],
            "settings": settings,
            "versions": versions(),
            "base": base,
        },
        {name: dict(calibration.statistic(name).named_buffers()) for name in names},
        components[0].signature() if components else None,
    )


def in_words(stages: Sequence[str]) -> str:
    """Returns the names joined, such as `statistics and sensitivity`."""
    return " and ".join(printable(name)[1:-1] for name in stages)
