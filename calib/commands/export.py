"""`calib export --format FORMAT ...`: writes files for other programs from an artifact, or a part of the artifact."""

import importlib
from collections.abc import Sequence

from calib.arguments import Parser, listing
from calib.errors import UsageError

# Each format has a module `command` with `run(argv) -> int` and its own options; it is imported only when used.
FORMATS = {
    "onnx": "a method's encoding, decoding and attention step as ONNX graphs",
    "artifact": "an artifact with only those tensors of another one that your methods read",
    "compressed-tensors": "a checkpoint with calibrated fp8 scales of keys and values, which vLLM loads",
}


def usage() -> str:
    hint = "calib export --format FORMAT --help lists a format's options."
    return listing("calib export --format FORMAT [options]", "formats", FORMATS, hint)


def run(argv: Sequence[str]) -> int:
    """Passes all arguments but `--format` to the format's own command; raises `UsageError` for an unknown format."""
    parser = Parser(prog="calib export", add_help=False, allow_abbrev=False)
    parser.add_argument("--format")
    asked, rest = parser.parse_known_args(argv)
    if asked.format is None and {"-h", "--help"} & set(rest):
        print(usage())
        return 0
    if asked.format not in FORMATS:
        found = "--format is missing" if asked.format is None else f"--format {asked.format}: unknown"
        raise UsageError(f"{found}, expected one of {', '.join(FORMATS)}; `calib export --help` tells what they are")
    status: int = importlib.import_module(f"calib.export.{asked.format.replace('-', '_')}.command").run(rest)
    return status
