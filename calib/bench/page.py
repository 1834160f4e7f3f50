"""The report of a bench: one HTML file with curves and tables, and the same tables as Markdown."""

from collections.abc import Iterable, Iterator, Sequence

from calib import markdown_page
from calib.artifact_view.tables import inline
from calib.bench.byte_sizes import spoken_size
from calib.bench.curves import COLOURS, Dot, curves
from calib.bench.curves import STYLE as CURVES
from calib.bench.request import AGAIN
from calib.bench.tables import Row, Run, failures, grid, rows_of, tables, too_small
from calib.evaluate.figures import number
from calib.evaluate.page.page import Drawn
from calib.evaluate.page.style import STYLE
from calib.html_page.document import document
from calib.html_page.table import Table, section, words
from calib.markdown_page import code, plain

MIB = 2**20
TIMES = (
    "All rows get the same random tokens in one process and decode in turns, in another order each turn. Times are medians, with "
    "quartiles in brackets. A speed over the baseline is the baseline's time over the row's in the same turn: above 1 the row "
    "is faster. The row whose name ends in 'again' is a second cache of the baseline, so its ratio differs from 1 only by noise. "
    "First token: the time from the creation of the cache until the token is in host memory."
)
BYTES = (
    "Cache: all its tensors on the device after the new tokens. Peaks: the most memory in use, minus what was in use before the "
    "cache was created (the weights, for example), with no other row's cache in memory. On a GPU they are reported by PyTorch's "
    "allocator, on a CPU by the operating system for the whole process. An empty cell means that the value is not known."
)
COMPUTED = (
    "Computed from the bytes of batches 1 and 2, as weights + fixed + batch size x bytes per sequence. These are the bytes of the "
    "peak, or of the cache alone (the batch is then an upper bound) if the peak is not known or a larger batch does not confirm "
    "it. Fixed is about 0 if noise of both makes it negative. On a GPU batches near the computed one are tried as well. CUDA's own "
    "context is not included."
)


def page(run: Run, command: str) -> str:
    """Returns the HTML page of a bench's document; all texts are escaped."""
    title = words(f"calib bench: {run['config']['name']}")
    body = [
        f"<h1>{title}</h1>",
        f"<p>{words(bench_model(run))}</p>",
        *listed("Not measured", failures(run), "failed"),
        *against_context(run),
        *(part for table in tables(run) for part in section(table)),
        *([f"<p>{words(COMPUTED)}</p>"] if run["largest"] else []),
        *listed("", too_small(run), "failed"),
        *section(provenance(run, command)),
    ]
    return document(title, STYLE + CURVES, body)


def against_context(run: Run) -> Iterator[str]:
    """Yields the charts of speed and memory against the context, with explanations; they need the style `CURVES`."""
    lines = [name for name in names(run) if name != run["config"]["baseline"] + AGAIN]  # the second row has no line
    looks = {name: position for position, name in enumerate(lines)}
    for title, about, drawn in (("Speed", TIMES, speed), ("Memory", BYTES, memory)):
        yield f"<h2>{title} against context</h2>"
        yield f"<p>{words(about)}</p>"
        yield legend(looks)
        for batch in run["config"]["batches"]:
            yield from drawn(run, batch, looks)


def curves_for(run: Run) -> Drawn:
    """Returns the curves of a checked run as a part of an evaluation's page, with a description of the run."""
    return Drawn(CURVES, [*against_context(run), f"<p>{words(bench_model(run))}</p>"])


def markdown(run: Run, command: str) -> str:
    """Returns the report as Markdown, without charts."""
    lines = [
        f"# calib bench: {plain(run['config']['name'])}",
        "",
        code(command),
        "",
        plain(bench_model(run)),
        "",
        TIMES,
        "",
        BYTES,
        "",
    ]
    missing = [f"- {plain(text)}" for text in failures(run)]
    lines += ["## Not measured", "", *missing, ""] if missing else []
    for table in tables(run):
        lines += markdown_page.section(table)
    lines += [COMPUTED, "", *(f"- {plain(text)}" for text in too_small(run)), ""] if run["largest"] else []
    return "\n".join(lines)


def bench_model(run: Run) -> str:
    """Returns sentences on the model, the machine and the settings."""
    config, versions = run["config"], {name: number for name, number in run["versions"].items() if name != "python"}
    machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
    return (
        f"{config['model']} in {config['dtype']} on {config['device']} ({machine}), weights "
        f"{spoken_size(run['model']['bytes'])}; {config['new_tokens']} new tokens in {config['turns']} turns, baseline "
        f"{config['baseline']}, seed {config['seed']}; {', '.join(f'{name} {value}' for name, value in versions.items())}. "
        "All figures on this page were written by this command."
    )


def names(run: Run) -> list[str]:
    """Returns the names of the rows in order, without duplicates."""
    return list(dict.fromkeys(row["name"] for row in run["cells"]))


def speed(run: Run, batch: int, looks: dict[str, int]) -> Iterator[str]:
    """Yields the chart of tokens per second for one batch."""

    def dot(row: Row) -> Dot:
        low, middle, high = row["tokens_per_second"]
        told = f"{row['name']}: {number(middle)} tokens/s [{number(low)}, {number(high)}] at {row['context']} tokens"
        return Dot(row["context"], middle, (low, high), told)

    yield f"<h3>{words(batch_in_words(batch))}</h3>"
    lines = {name: [dot(row) for row in found] for name, found in measured(run, batch, looks).items()}
    yield from curves(lines, looks, "tokens per second", f"tokens per second against context, {batch_in_words(batch)}")


def memory(run: Run, batch: int, looks: dict[str, int]) -> Iterator[str]:
    """Yields the chart of the caches' bytes for one batch."""

    def dot(row: Row) -> Dot:
        size = row["sizes"]["measured_bytes"]
        return Dot(row["context"], size / MIB, None, f"{row['name']}: {spoken_size(size)} at {row['context']} tokens")

    yield f"<h3>{words(batch_in_words(batch))}</h3>"
    lines = {name: [dot(row) for row in found] for name, found in measured(run, batch, looks).items()}
    yield from curves(lines, looks, "cache, MiB", f"memory of the cache against context, {batch_in_words(batch)}")


def legend(looks: dict[str, int]) -> str:
    """Returns the legend of colours; on a phone the names at the lines' ends are not visible."""
    shown = (f'<span><i class="kind-{look % COLOURS}"></i>{words(name)}</span>' for name, look in looks.items())
    return f'<p class="legend">{"".join(shown)}</p>'


def measured(run: Run, batch: int, names: Iterable[str]) -> dict[str, list[Row]]:
    """Returns the results of a batch that did not fail, by row name, over all contexts."""
    cells = [row for one, context in grid(run) if one == batch for row in rows_of(run, one, context)]
    return {name: [row for row in cells if row["name"] == name and "error" not in row] for name in names}


def batch_in_words(batch: int) -> str:
    """Returns a batch in words."""
    return f"batch size {batch}"


def listed(title: str, texts: Iterator[str], look: str) -> Iterator[str]:
    """Yields an HTML list under its title; nothing if it is empty."""
    found: Sequence[str] = list(texts)
    if found:
        yield f"<h2>{words(title)}</h2>" if title else ""
        yield "<ul>"
        yield from (f'<li class="{look}">{words(text)}</li>' for text in found)
        yield "</ul>"


def provenance(run: Run, command: str) -> Table:
    """Returns a table of everything needed to repeat the run."""
    rows = [("command", command)]
    rows += [(key, inline(value)) for key, value in run["config"].items() if key not in ("name", "model")]
    rows += [(key, inline(run[key])) for key in ("model", "versions", "machine")]
    return Table("Provenance", ["", ""], [list(pair) for pair in rows])
