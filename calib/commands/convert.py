"""`calib convert KIND SOURCE OUTPUT`: writes a checkpoint of another kind as a folder that transformers loads and calib fits."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from calib.arguments import Parser

# Each kind is a module of calib/convert with `convert(source, output)`.
KINDS = {"baichuan2": "Baichuan2 7B as a Llama", "gguf": "a GGUF file, dequantised to float32"}
CONFIGS = {"baichuan2": "--config baichuan2.yaml "}  # options of `calib fit` for such a checkpoint


def run(argv: Sequence[str]) -> int:
    """Converts as `argv` says; raises `UsageError` for a wrong request or a damaged checkpoint, `RunError` for a folder that
    cannot be written."""
    parser = Parser(
        prog="calib convert",
        description="Write a checkpoint folder that calib can fit from a checkpoint of another kind.",
        epilog="kinds: " + "; ".join(f"{kind}: {text}" for kind, text in KINDS.items()),
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "source", metavar="SOURCE", type=Path, help="the checkpoint: a folder in safetensors, or a GGUF file"
    )
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a folder that is not there yet")
    asked = parser.parse_args(argv)
    importlib.import_module(f"calib.convert.{asked.kind}").convert(asked.source, asked.output)
    print(f"wrote {asked.output}\nnext: calib fit {CONFIGS.get(asked.kind, '')}--model.path {asked.output}")
    return 0
