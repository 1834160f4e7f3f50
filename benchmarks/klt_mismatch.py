"""Measures the loss of `klt` on other kinds of text than it was calibrated on: fits an artifact on each corpus, and evaluates each
on each text. Writes benchmarks/results/klt_mismatch.json and a table of docs/results/klt.

    python -m benchmarks.klt_mismatch --text wikitext=wiki.valid.raw:wiki.test.raw --text stories=a.txt:b.txt --write

`--rows coding` compares components alone, sizes, predictions and trellis-coded levels, instead of keys before and after RoPE, and
writes klt_mismatch_coding.json. A text is NAME=FITTED_ON:MEASURED_ON. The corpus `generated`, which needs no file, is half
retrieval documents and half samples of the model; every artifact is also measured on text sampled from the model and on retrieval.
`--tokens` adds `generated` in other sizes, with sensitivities on all sequences; `--lengths` adds it in shorter sequences with as
many tokens, once all from position 0, and once from different positions below 512; `--positions` adds fits with positions below
other limits, for `generated` and the first text.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from calib.cli import main as calib

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TABLES = HERE.parent / "docs" / "results" / "klt"
FOLDER = Path("runs/klt_mismatch")
LENGTH, SEQUENCES = 512, 48  # of configs/tiny.yaml
PLAIN, PREDICTED = {"size": False, "predict": False}, {"size": True, "predict": True, "trellis": False}
ROWS: dict[str, dict[str, dict[str, Any]]] = {  # options of klt, by comparison and row
    "rope": {
        f"{bits} {rope}": {"bits": bits, "rope": rope, **PLAIN} for rope in ("before", "after") for bits in (2, 1)
    },
    "coding": {
        f"{bits} {name}": {"bits": bits, **coding}
        for bits in (2, 1)
        for name, coding in (
            ("alone", PLAIN),
            ("with sizes and predictions", PREDICTED),
            ("with a trellis too", {**PREDICTED, "trellis": True}),
        )
    },
}


TITLES = {
    "rope": "klt on other text: keys before and after RoPE",
    "coding": "klt on other text: sizes, predictions and a trellis",
}

TOLD = """\
`klt` calibrated on one corpus (first column) and evaluated on several texts. A text's column has the KL divergence from the full
cache in nats per token, the last column the share of exact answers on 60 lines. The corpus "generated" is half retrieval documents
and half samples of the model. "A quarter sampled" means that a quarter of the corpus is samples of the model, "all" means all texts
together. Written by `benchmarks/klt_mismatch.py`."""


def corpora(asked: argparse.Namespace, texts: dict[str, tuple[str, str]]) -> dict[str, list[str]]:
    """Returns by name the options of each fit's corpus.

    48 sequences of each text, each text also with a quarter of samples of the model, all texts together, and `generated` with other
    sizes, lengths and positions.
    """
    found = {"generated": [], **{name: ["--data.text", fitted] for name, (fitted, _) in texts.items()}}
    found |= {
        f"{name}, a quarter sampled": ["--data.text", fitted, "--data.sampled", "0.25"]
        for name, (fitted, _) in texts.items()
    }
    found |= {"all": ["--data.text", json.dumps([fitted for fitted, _ in texts.values()])]} if len(texts) > 1 else {}
    found |= {f"generated, {size:,} tokens": sized(size // LENGTH) for size in asked.tokens}
    for length in asked.lengths:
        shorter = ["--data.length", str(length), *sized(SEQUENCES * LENGTH // length)]
        found[f"generated, sequences of {length}"] = shorter
        found[f"generated, sequences of {length}, positions below {LENGTH}"] = [
            *shorter,
            "--data.positions",
            str(LENGTH),
        ]
    for most in asked.positions:
        for name in ("generated", *(name for one in list(texts)[:1] for name in (one, f"{one}, a quarter sampled"))):
            found[f"{name}, positions below {most:,}"] = [*found[name], "--data.positions", str(most)]
    return found


def sized(sequences: int) -> list[str]:
    """Returns the options for so many sequences, all of them also used for sensitivity."""
    return ["--data.sequences", str(sequences), "--model.sensitivity_sequences", str(sequences)]


def fitted(name: str, options: list[str]) -> Path:
    """Returns the artifact of a corpus, fitted if it does not exist, without dictionaries, which `klt` does not read."""
    output = FOLDER / f"{''.join(c if c.isalnum() else '-' for c in name)}.calib.safetensors"
    if not output.exists():
        own = ["--output", str(output), "--model.dictionary.atoms", "0", "--trainer.logger", "false"]
        assert calib(["fit", "--config", "tiny.yaml", *options, *own]) == 0
    return output


def measured(artifact: Path, compared: str, texts: dict[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Returns KL in nats per token by row and text, and the share of exact answers on 60 lines."""
    rows = [
        {"name": name, "method": "klt", **options, "window": 0, "artifact": True}
        for name, options in ROWS[compared].items()
    ]
    rows += (
        [{"name": "kivi-2", "method": "kivi", "bits": 2, "residual": 32}]
        if artifact.stem.startswith("generated.")
        else []
    )
    sources = {"sampled": None} | {name: text for name, (_, text) in texts.items()}
    tasks = [{"task": "agreement", "title": name, "text": text, "tokens": 2048} for name, text in sources.items()]
    request = {"model": "artifacts/tiny-llama", "artifact": str(artifact), "products": "float32", "batch_size": 25}
    request |= {"methods": rows, "tasks": [*tasks, {"task": "retrieval", "lines": [60], "cases": 100}]}
    config, output = artifact.with_suffix(f".{compared}.yaml"), artifact.with_suffix(f".{compared}.eval")
    config.write_text(yaml.safe_dump(request, sort_keys=False))
    assert calib(["eval", "--config", str(config), "--output", str(output)]) == 0
    found: dict[str, dict[str, float]] = {}
    for cell in json.loads((output / "results.json").read_text())["cells"]:
        figures = cell["figures"]
        found.setdefault(cell["name"], {})[cell["column"]] = figures.get("kl", figures.get("exact"))
    return found


def table(compared: str, found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Returns a table with a line for each corpus and row compared."""
    columns = list(next(iter(found["generated"].values())))
    lines = [
        f"| calibrated on | bits, {'keys before or after RoPE' if compared == 'rope' else 'coding of components'} | "
        + " | ".join(columns)
        + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for corpus, rows in found.items():
        for row, figures in rows.items():
            cells = [f"{figures[c]:.2f}" if "lines" in c else f"{figures[c]:.4f}" for c in columns]
            lines.append(f"| {'none' if row.startswith('kivi') else corpus} | {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(compared: str, found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Returns the page of docs/results/klt: the table under its title."""
    return f"# {TITLES[compared]}\n\n{TOLD}\n\n{table(compared, found)}"


def main() -> None:
    """Fits, measures and prints; with --write saves run and page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FITTED_ON:MEASURED_ON")
    parser.add_argument("--rows", choices=ROWS, default="rope", help="what is compared")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[10240, 102400, 1024000], help="further sizes of `generated`"
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[128], help="`generated` in shorter sequences")
    parser.add_argument("--positions", type=int, nargs="*", default=[2048], help="`generated` at more positions")
    parser.add_argument("--corpora", nargs="*", help="of all these the ones to fit; `generated` is always among them")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    texts = {name: tuple(files.split(":")) for name, files in (text.split("=", 1) for text in asked.text)}
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = corpora(asked, texts)
    if asked.corpora is not None:
        wanted = {name: wanted[name] for name in ["generated", *asked.corpora]}
    found = {name: measured(fitted(name, options), asked.rows, texts) for name, options in wanted.items()}
    print(table(asked.rows, found))
    if asked.write:
        named = {name: [Path(file).name for file in files] for name, files in texts.items()}
        suffix = "" if asked.rows == "rope" else f"_{asked.rows}"
        (RESULTS / f"klt_mismatch{suffix}.json").write_text(
            json.dumps({"texts": named, "found": found}, indent=1) + "\n"
        )
        (TABLES / f"mismatch{suffix}.md").write_text(page(asked.rows, found))


if __name__ == "__main__":
    main()
