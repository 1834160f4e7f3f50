"""`calib convert KIND SOURCE OUTPUT`: a checkpoint whose own code cannot take a cache, as one of an architecture that can."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from calib.arguments import Parser
from calib.errors import UsageError

KINDS = {"baichuan2": "Baichuan2 7B as a Llama"}  # each a module of calib/convert with `convert(source, output)`


def run(argv: Sequence[str]) -> int:
    """Converts as `argv` says; raises `UsageError` for a wrong request, `RunError` for a damaged checkpoint."""
    parser = Parser(
        prog="calib convert",
        description="Write a checkpoint that calib can fit from one whose own code cannot take a cache.",
        epilog="kinds: " + "; ".join(f"{kind}: {text}" for kind, text in KINDS.items()),
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=f"one of {', '.join(KINDS)}")
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of the checkpoint, in safetensors")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a folder that is not there yet")
    asked = parser.parse_args(argv)
    if not asked.source.is_dir():
        raise UsageError(
            f"'{asked.source}' is no folder; download the checkpoint first (hf download NAME --local-dir FOLDER)"
        )
    importlib.import_module(f"calib.convert.{asked.kind}").convert(asked.source, asked.output)
    print(f"wrote {asked.output}\nnext: calib fit --config {asked.kind}.yaml --model.path {asked.output}")
    return 0
