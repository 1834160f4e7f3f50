"""`calib export --format artifact`: writes an artifact with some of another one's tensors.

A fit writes the tensors of all methods. An artifact that is shipped for one method needs fewer: `klt` reads a fifth of the bytes
that a fit with dictionaries writes.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from calib.arguments import Parser
from calib.artifact_name import artifact_file, load_artifact
from calib.errors import UsageError
from calib.runtime.messages.artifact_error import ArtifactError
from calib.runtime.messages.printable import printable

if TYPE_CHECKING:
    from calib.runtime import Artifact


def run(argv: Sequence[str]) -> int:
    """Writes the file and prints its tensors' names; raises `UsageError` or `ArtifactError`."""
    asked = parse(argv)
    path = artifact_file(asked.artifact)
    whole = load_artifact(path)
    if os.path.exists(os.path.realpath(asked.output)):  # realpath, because `missing/../a` is written as `a`
        raise UsageError(f"--output {asked.output}: exists already; choose a name that is free")
    part = part_of(whole, asked.tensors)
    part.save(asked.output)
    for name in part.tensors:
        print(name)
    bytes_of = {path: Path(path).stat().st_size for path in (path, asked.output)}
    print(
        f"wrote {asked.output} ({len(part.tensors)} of {len(whole.tensors)} tensors, "
        f"{bytes_of[asked.output] / 1e3:.1f} of {bytes_of[path] / 1e3:.1f} kB)"
    )
    return 0


def part_of(artifact: "Artifact", patterns: Sequence[str]) -> "Artifact":
    """Returns the artifact with only the tensors whose names match one of `patterns` (such as `keys.klt.before.*`).

    The patterns are recorded in its provenance as `tensors`. Raises UsageError for a pattern that matches no tensor, and if a
    tensor is taken without another that it needs.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in artifact.tensors):
            count = len(artifact.tensors)
            raise UsageError(
                f"--tensors {printable(pattern)}: fits none of this artifact's {count} tensors; `calib inspect` lists them"
            )
    taken = {
        name: tensor
        for name, tensor in artifact.tensors.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    provenance = {**artifact.provenance, "tensors": list(patterns)}
    try:
        return replace(artifact, tensors=taken, provenance=provenance)
    except ArtifactError as error:  # a tensor without one that it needs
        raise UsageError(f"--tensors: {str(error).partition(';')[0]}; take what belongs together") from error


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed options."""
    parser = Parser(
        prog="calib export --format artifact",
        description="Write an artifact with only those tensors of another one that your methods read.",
        allow_abbrev=False,
    )
    parser.add_argument("--artifact", required=True, metavar="FILE", help="what `calib fit` wrote")
    parser.add_argument(
        "--tensors",
        required=True,
        nargs="+",
        metavar="PATTERN",
        help="names to take, such as 'keys.klt.before.*'; `calib inspect` lists what there is",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write; must not be there yet")
    return parser.parse_args(argv)
