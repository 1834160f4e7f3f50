"""A fit on many machines that share nothing but files: each measures a shard, and the shards merge as processes of DDP do.

A round is what a shard can measure by itself: ranges, moments and derivatives first, then, in what all shards have found, clip
factors and components, and last the held-out errors. Minima, maxima, counts and samples of the whole are those of one machine, bit
for bit; sums are float64, added in the order of the shards' numbers.
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

# How far bases may be apart that two machines make of the same sums, of a head's largest entry. Components turned by less are
# quantised with the same errors to as much. Where two of them vary equally much, another processor may take other ones, or in
# another order: those differ by about 1, and their errors may not be added up.
SAME_BASES = 1e-3
LISTED = 8  # shards in a message


@dataclass(frozen=True)
class Round:
    """What shards have measured, each by itself.

    Attributes:
        stages: that they ran.
        files: one of each shard, in the order of their numbers.
    """

    stages: tuple[Stage, ...]
    files: tuple[ShardFile, ...]


def arrange(calibration: Calibration, files: Sequence[ShardFile]) -> list[Round]:
    """The files by rounds, in order; theirs does not matter. Nothing is read but their metadata, and no model is needed.

    Raises UsageError, naming the file, unless every round is whole, each after the ones before it, by software of this version.
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
            wanted = f"measure {in_words(names)} before, of which there is no shard" if names else "have no such stage"
            raise UsageError(f"{left[0].path}: has {in_words(left[0].document['stages'])}, and these options {wanted}")
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
    """Names of the stages that are complete."""
    return [stage.name for one in rounds for stage in one.stages]


def base_of(rounds: Sequence[Round]) -> str:
    """What a later round says of those before it: a hash of their metadata, sums of all buffers among it; "" for none."""
    return canonical_json.sha256([[file.document for file in one.files] for one in rounds]) if rounds else ""


def merge_shards(calibration: Calibration, rounds: Sequence[Round], settings: Mapping[str, Any]) -> None:
    """Merges what the shards have measured into the statistics of `calibration`, one statistic of one shard in memory at a time.

    Args:
        calibration: prepared for the model; nothing was measured yet.
        rounds: of shards.
        settings: what the statistics depend on, as plain JSON: those of the shards must be the same.

    Raises UsageError, naming the file and what is wrong with it.
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
    """UsageError where the shard was measured with other settings, or software, than `now`: the first of them is named."""
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise UsageError(
                f"{file.path}: was measured with {kind}{printable(key)[1:-1]} = {printable(before.get(key))}, here it is "
                f"{printable(now.get(key))}: shards and their merge need the same model, text, settings and versions"
            )


def complete(files: Sequence[ShardFile], stages: str) -> tuple[ShardFile, ...]:
    """The files in the order of their numbers; UsageError unless each shard of one division is there, and once."""
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
    """UsageError where a shard measured in other bases of `klt` than this machine makes of the same sums."""
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
    """Writes what `stages` have measured of the shard. Raises RunError."""
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
    """Such as `statistics and sensitivity`."""
    return " and ".join(printable(name)[1:-1] for name in stages)
