"""kvpress's methods on the cases of `calib eval --write-cases`, in an environment of its own.

    python -m benchmarks.peers.kvpress cases.json --press SnapKVPress --ratio 0.5 --out snapkv.json

README.md beside this file has the commands before and after. Nothing of the project is imported, because kvpress needs older
releases of transformers than the project does. `--press none` needs no kvpress either: transformers' cache, whole.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.peers.case_file import FORMAT, largest_token, read_cases
from benchmarks.peers.mistake import Wrong, one_line
from benchmarks.peers.presses import NONE, Press, build
from benchmarks.peers.scoring import measure, words

CHECKOUT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 where a column failed; 2 for a mistake of the user's, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.kvpress", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("cases", type=Path, metavar="CASES", help="file of `calib eval --write-cases`")
    parser.add_argument(
        "--press",
        action="append",
        required=True,
        metavar="NAME",
        help=f"such as SnapKVPress, wrappers first (AdaKVPress:SnapKVPress), or {NONE}; may be given several times",
    )
    parser.add_argument("--ratio", type=float, help="share of the prefill's pairs to remove (compression_ratio)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="another option of the press"
    )
    parser.add_argument("--attention", choices=("sdpa", "eager"), help="eager for presses that read attention weights")
    parser.add_argument("--device", default="cpu", help="such as cpu (the default) or cuda")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="to write; a folder for several presses"
    )
    asked = parser.parse_args(argv)
    try:
        return run(asked)
    except Wrong as error:
        print(f"kvpress.py: error: {error}", file=sys.stderr)
        return 2


def run(asked: argparse.Namespace) -> int:
    """Answers the cases with every press and writes a file each; raises Wrong."""
    cases = read_cases(asked.cases)
    library = None if set(asked.press) == {NONE} else kvpress()
    options = dict(parse(option) for option in asked.option)
    presses = [build(name, asked.ratio, options, library) for name in dict.fromkeys(asked.press)]
    files = outputs(asked.out, presses)
    model = load(cases, asked.device, asked.attention)
    if largest_token(cases) >= model.get_input_embeddings().num_embeddings:
        raise Wrong(
            f"'{asked.cases}' has token {largest_token(cases)}, more than '{cases['model']}' knows; write them again"
        )
    versions = {name: version(name) for name in ("kvpress", "torch", "transformers") if library or name != "kvpress"}
    failed = 0
    for press, file in zip(presses, files, strict=True):
        columns = []
        for column in cases["columns"]:
            columns.append(measure(model, press, column))
            print(f"{press.name}: {column['title']}: {words(columns[-1])}", flush=True)
        failed += sum("error" in column for column in columns)
        own = {**press.options, **({"attention": asked.attention} if asked.attention else {})}
        given = {"weights": cases["weights"], "dtype": cases["dtype"]}
        write(
            file,
            {"format": FORMAT, "name": f"kvpress {press.name}", "options": own, "versions": versions, **given},
            columns,
        )
    return 1 if failed else 0


def kvpress() -> Any:
    """The library; raises Wrong where it is not installed."""
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        remedy = "it has an environment of its own, see benchmarks/peers/README.md"
        raise Wrong(f"kvpress cannot be imported here ({one_line(error)}); {remedy}") from error


def parse(option: str) -> tuple[str, Any]:
    """Name and value of `NAME=VALUE`; a value that is no JSON is text."""
    name, equals, value = option.partition("=")
    if not equals or not name:
        raise Wrong(f"--option {option!r}: expected NAME=VALUE, such as window_size=32")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def outputs(out: Path, presses: Sequence[Press]) -> list[Path]:
    """The file of each press: `out` itself for one, else files in the folder `out`."""
    several = len(presses) > 1
    if several and (out.is_file() or out.suffix == ".json"):
        raise Wrong(f"--out '{out}' is a file, and {len(presses)} presses need a folder for one each")
    if not several and out.is_dir():
        raise Wrong(f"--out '{out}' is a folder, expected a file to write")
    return [out / f"{press.name.replace(':', '-')}.json" for press in presses] if several else [out]


def load(cases: Mapping[str, Any], device: str, attention: str | None) -> PreTrainedModel:
    """The cases' model in their dtype; a folder is looked for here and in the checkout. Raises Wrong where there is none."""
    path = cases["model"]
    if not Path(path).exists() and (CHECKOUT / path).is_dir():
        path = str(CHECKOUT / path)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, cases["dtype"]), **chosen)
        return model.to(device).eval().requires_grad_(False)
    except Exception as error:  # transformers and torch raise many types; each means that this model cannot be had
        raise Wrong(f"cannot load the cases' model '{path}' on {device} ({one_line(error)[:200]})") from error


def write(file: Path, head: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of one press."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**head, "columns": columns}, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Wrong(f"cannot write '{file}' ({error.strerror}); give another --out") from error
    print(f"wrote {file}")


if __name__ == "__main__":
    sys.exit(main())
