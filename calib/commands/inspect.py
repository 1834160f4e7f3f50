"""`calib inspect ARTIFACT [--json | --html FILE]`: shows the contents of an artifact, as tables, JSON or a page.

The file must pass every check of `Artifact.load` first, so a method would read the same contents.
"""

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.arguments import Parser
from calib.artifact_name import artifact_file, load_artifact
from calib.errors import RunError, UsageError

if TYPE_CHECKING:
    from calib.runtime.artifact.artifact import Artifact

ENDINGS = (".html", ".htm")


def run(argv: Sequence[str]) -> int:
    """Shows the artifact named in `argv`; raises `UsageError` for a wrong request or a file that is refused."""
    parser = Parser(prog="calib inspect", description="Show what an artifact of `calib fit` holds, after checking it.")
    parser.add_argument(
        "artifact", metavar="ARTIFACT", help="the .calib.safetensors file, its folder, or a name on the hub"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    form.add_argument(
        "--html", metavar="FILE", help="write one page with tables and drawings instead, to look at offline"
    )
    asked = parser.parse_args(argv)
    path = artifact_file(asked.artifact)
    if asked.html is not None:
        check_output(asked.html, path)

    artifact = load_artifact(path)
    from calib.runtime.messages.artifact_error import ArtifactError  # imports torch

    try:
        shown(artifact, path, asked)
    except ArtifactError as error:  # some records are checked only when they are shown
        raise UsageError(str(error)) from error
    return 0


def shown(artifact: "Artifact", path: Path, asked: Namespace) -> None:
    """Prints tables or JSON, or writes the page, depending on the flags in `asked`."""
    if asked.json:
        print(json.dumps(as_json(artifact, path), indent=2, sort_keys=True, allow_nan=False))
    elif asked.html is not None:
        write_page(artifact, path, asked.html)
    else:
        from calib.artifact_view.tables import tables
        from calib.artifact_view.terminal import show

        show(tables(artifact, path))


def check_output(output: str, artifact: Path) -> None:
    """Raises UsageError if the page's name does not end in .html or .htm, or the page would overwrite the artifact."""
    if not output.lower().endswith(ENDINGS) or os.path.isdir(output):
        raise UsageError(f"--html {output}: must name a file that ends in {ENDINGS[0]}")
    written = os.path.realpath(output)  # of `missing/../a.html` too
    if os.path.exists(written) and os.path.samefile(written, artifact):
        raise UsageError(f"--html {output}: is the artifact itself; name another file")


def write_page(artifact: "Artifact", path: Path, output: str) -> None:
    """Writes the page and prints its name; raises `RunError` if it cannot be written."""
    from calib.artifact_view.page import page
    from calib.runtime.files.atomic_file import write_atomically

    try:
        write_atomically(output, page(artifact, path).encode())
    except OSError as error:
        raise RunError(f"{output}: cannot be written ({error.strerror}); choose another folder") from error
    print(f"wrote {output}")


def as_json(artifact: "Artifact", path: Path) -> dict[str, Any]:
    """Returns the artifact as plain JSON; tensors are given by dtype, shape, and least, median and greatest value."""
    from calib.artifact_view.tables import spread
    from calib.runtime.artifact.file import FORMAT_VERSION
    from calib.runtime.messages.dtype_name import dtype_name

    return {
        "file": {
            "name": path.name,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
        "format_version": FORMAT_VERSION,
        "fingerprint": artifact.fingerprint,
        "provenance": artifact.provenance,
        "clip_bits": list(artifact.clip_bits),
        "tensors": {
            name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), **spread(tensor)}
            for name, tensor in artifact.tensors.items()
        },
    }
