"""`calib merge SHARD... --config tiny.yaml`: merges shards of `calib fit --shard` from many machines into one artifact."""

from pathlib import Path

from calib.commands.fit import run_fit
from calib.errors import UsageError

USAGE = """usage: calib merge SHARD [SHARD ...] [options of calib fit]

Merge the files that `calib fit --shard K/N` has written on all machines, measure the stages that are left, and write the artifact
that one machine would have written. Give the options that the shards were given; --output names the artifact.

  --shard K/N  measure only the K-th of N parts of the corpus in the stages that are left, and write a shard to --output

`calib fit --help` lists the other options."""


def run(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    first = next((position for position, word in enumerate(argv) if word.startswith("-")), len(argv))
    files, words = argv[:first], argv[first:]
    if not files and {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0
    if not files:
        raise UsageError("no file to merge: name those of all shards first, and then the options that they were given")
    return run_fit(words, [Path(name) for name in files])
