"""Writes the short tables of docs/results/smollm2: a row for each method that a run has finished.

    python -m benchmarks.smollm2_summary

Reads the runs of `make smollm2-table`, `smollm2-other-text`, `smollm2-mixture`, `smollm2-trellis`, `smollm2-perplexity`,
`smollm2-separators`, `smollm2-long`, `smollm2-lm-eval`, `short-prompt` and `smollm2-decode` in `benchmarks/results` alone, and
writes between the page's markers.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs/results/smollm2/README.md"
TEXTS = ("Wikipedia", "code", "stories")
SEPARATORS = ("stories with separators", "stories without")
SHORT = "896 tokens behind 128"
LENGTHS = ("2,048 tokens", "4,096 tokens", "8,192 tokens")

Cells = Mapping[str, Mapping[str, Any]]  # a method's cells by column


def short_cells(cells: Cells) -> dict[str, str]:
    """Returns a row of the main table, after 256 tokens."""
    lines, text = cells["20 lines"]["figures"], cells["perplexity"]["figures"]
    agreement = {name: cells[f"agreement on {name}"]["figures"] for name in TEXTS}
    sizes = cells["perplexity"]["sizes"]
    return {
        "20 lines": f"{lines['exact']:.3f} ({lines['low']:.2f}-{lines['high']:.2f})",
        "log p": f"{lines['log_probability']:.2f}",
        "perplexity": f"{text['perplexity']:.2f}",
        **{f"KL, {name}": f"{found['kl']:.4f}" for name, found in agreement.items()},
        "same token": f"{agreement[TEXTS[0]]['agreement']:.3f}",
        **_bits(sizes),
    }


def other_text_cells(cells: Cells) -> dict[str, str]:
    """Returns a row of the table with an artifact fitted on stories; in brackets the KL of the main table."""
    table = json.loads((RESULTS / "smollm2.json").read_text())["cells"]
    usual = {(cell["name"], cell["column"]): cell["figures"] for cell in table}
    return {
        f"KL, {text}": f"{cells[column]['figures']['kl']:.4f} ({usual[cells[column]['name'], column]['kl']:.4f})"
        for text in TEXTS
        for column in [f"agreement on {text}"]
    }


def kl_cells(columns: Mapping[str, str], cells: Cells) -> dict[str, str]:
    """Returns a row with the KL of `columns`, given by the names shown."""
    return {f"KL, {name}": f"{cells[column]['figures']['kl']:.4f}" for name, column in columns.items()}


def perplexity_cells(cells: Cells) -> dict[str, str]:
    """Returns a row with the perplexity, and its increase over the full cache's."""
    run = json.loads((RESULTS / "smollm2_perplexity.json").read_text())
    full = next(cell for cell in run["cells"] if cell["method"] == "full")["figures"]["perplexity"]
    found = cells["perplexity"]["figures"]["perplexity"]
    return {
        "perplexity": f"{found:.2f}",
        "increase over the full cache": f"{100 * (found / full - 1):.1f} %",
        **_bits(cells["perplexity"]["sizes"]),
    }


def trellis_cells(cells: Cells) -> dict[str, str]:
    """Returns a row of the table of sizes, predictions and trellis-coded levels; in brackets the 95 % interval."""
    found = {text: cells[f"agreement on {text}"]["figures"] for text in TEXTS[:2]}
    return {
        **{
            f"KL, {text}": f"{figures['kl']:.4f} ({figures['kl_low']:.4f}-{figures['kl_high']:.4f})"
            for text, figures in found.items()
        },
        **{f"same token, {text}": f"{figures['agreement']:.3f}" for text, figures in found.items()},
        **_bits(cells[f"agreement on {TEXTS[0]}"]["sizes"]),
    }


def long_cells(cells: Cells) -> dict[str, str]:
    """Returns a row of the table after thousands of tokens; unmeasured cells are empty."""
    found = {length: cells[length]["figures"] if length in cells else None for length in LENGTHS}
    return {
        **{f"KL, {length}": f"{figures['kl']:.4f}" if figures else "" for length, figures in found.items()},
        **{
            f"same token, {length}": f"{figures['agreement']:.3f}" if figures else ""
            for length, figures in found.items()
        },
        **_bits(cells[LENGTHS[1]]["sizes"]),
    }


def last_word_cells(cells: Cells) -> dict[str, str]:
    """Returns a row of lm-eval's task `last_word`."""
    found = cells["last_word"]["figures"]
    return {
        "accuracy": f"{found['accuracy']:.2f} ({found['accuracy_low']:.2f}-{found['accuracy_high']:.2f})",
        "perplexity of the word": f"{found['perplexity']:.2f}",
        **_bits(cells["last_word"]["sizes"]),
    }


def short_prompt_cells(cells: Cells) -> dict[str, str]:
    """Returns a row of the table of a long answer to a short prompt."""
    found = cells[SHORT]["figures"]
    return {
        "perplexity": f"{cells['perplexity']['figures']['perplexity']:.2f}",
        "KL": f"{found['kl']:.4f}",
        "same token": f"{found['agreement']:.3f}",
        "attention error": f"{found['error']:.3f}",
        **_bits(cells[SHORT]["sizes"]),
    }


def _bits(sizes: Mapping[str, Any]) -> dict[str, str]:
    marginal = sizes["marginal_bits"]
    return {
        "bits per value": f"{sizes['bits_per_value']:.2f}",
        "marginal bits": "" if marginal is None else f"{marginal:.2f}",
    }


def of_cells(
    cells_of: Callable[[Cells], dict[str, str]], columns: set[str], run: Mapping[str, Any]
) -> Iterator[list[str]]:
    """Yields header and rows of a run of `calib eval`, in its order, for the methods that have all of `columns`."""
    methods: dict[str, dict[str, Any]] = {}
    groups: dict[str, str] = {}
    for cell in run["cells"]:
        methods.setdefault(cell["name"], {})[cell["column"]] = cell
        groups[cell["name"]] = cell["group"]
    shown: str | None = None
    for name, cells in methods.items():
        if not columns <= cells.keys():
            continue
        made = cells_of(cells)
        if shown is None:
            yield ["method", *made]
            yield ["---"] * (len(made) + 1)
            shown = ""
        if groups[name] != shown:
            shown = groups[name]
            yield [f"**{shown}**", *[""] * len(made)]
        yield [f"`{name}`", *made.values()]


def of_steps(run: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields header and rows with the milliseconds of a decode step, and its time over DynamicCache's."""
    contexts = run["contexts"]
    yield ["cache", *(f"{int(context):,} tokens" for context in contexts)]
    yield ["---"] * (len(contexts) + 1)
    for name in next(iter(contexts.values())):
        found = [of[name] for of in contexts.values()]
        yield [f"`{name}`", *(f"{own['milliseconds'][1]:.0f} ms, {own['ratio']:.2f}" for own in found)]


TABLES: dict[str, tuple[str, Callable[[Mapping[str, Any]], Iterator[list[str]]]]] = {
    "table": (
        "smollm2.json",
        partial(of_cells, short_cells, {"20 lines", "perplexity", *(f"agreement on {text}" for text in TEXTS)}),
    ),
    "other text table": (
        "smollm2_other_text.json",
        partial(of_cells, other_text_cells, {f"agreement on {text}" for text in TEXTS}),
    ),
    "mixture table": (
        "smollm2_mixture.json",
        partial(
            of_cells,
            partial(kl_cells, {text: f"agreement on {text}" for text in TEXTS}),
            {f"agreement on {text}" for text in TEXTS},
        ),
    ),
    "perplexity table": ("smollm2_perplexity.json", partial(of_cells, perplexity_cells, {"perplexity"})),
    "separators table": (
        "smollm2_separators.json",
        partial(of_cells, partial(kl_cells, {text: text for text in SEPARATORS}), {*SEPARATORS}),
    ),
    "trellis table": (
        "smollm2_trellis.json",
        partial(of_cells, trellis_cells, {f"agreement on {text}" for text in TEXTS[:2]}),
    ),
    "long table": ("smollm2_long.json", partial(of_cells, long_cells, {*LENGTHS[:2]})),
    "last word table": ("smollm2_lm_eval.json", partial(of_cells, last_word_cells, {"last_word"})),
    "short prompt table": ("short_prompt.json", partial(of_cells, short_prompt_cells, {SHORT, "perplexity"})),
    "decode table": ("decode_smollm2.json", of_steps),
}


def page(text: str) -> str:
    """Returns `text` with the runs' tables between their markers."""
    for name, (run, rows_of) in TABLES.items():
        first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(first)
        _, after = rest.split(last)
        written = "\n".join(f"| {' | '.join(row)} |" for row in rows_of(json.loads((RESULTS / run).read_text())))
        text = f"{before}{first}\n{written}\n{last}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(PAGE)
