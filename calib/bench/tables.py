"""The tables of a bench, made from its document: times and memory for each batch and context, and the largest batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from calib.bench.byte_sizes import spoken_size
from calib.evaluate.cache_size import is_encoded
from calib.evaluate.figures import number
from calib.html_page.table import Table

Run = Mapping[str, Any]
Row = Mapping[str, Any]

NO_ROOM = "out of memory"
FAILED = "failed"
MEMORY = "Memory"
UNENCODED = "nothing encoded yet"
LARGEST = "Largest batch"


def tables(run: Run) -> list[Table]:
    """Returns all tables; for each cell, times before bytes."""
    found = [table for batch, context in grid(run) for table in of_cell(run, batch, context)]
    return [*found, *([largest_table(run)] if run["largest"] else [])]


def grid(run: Run) -> list[tuple[int, int]]:
    """Returns (batch, context) of every cell."""
    return [(batch, context) for batch in run["config"]["batches"] for context in run["config"]["contexts"]]


def rows_of(run: Run, batch: int, context: int) -> list[Row]:
    """Returns the rows of one cell."""
    return [row for row in run["cells"] if (row["batch"], row["context"]) == (batch, context)]


def of_cell(run: Run, batch: int, context: int) -> Iterator[Table]:
    """Yields the tables of times and bytes of one cell; the baseline's second row has no bytes."""
    rows, name = rows_of(run, batch, context), f"{batch} x {context} tokens"
    over = f"over {run['config']['baseline']}"
    times: dict[str, Callable[[Row], str]] = {
        "prefill ms": lambda row: milliseconds(row, "prefill"),
        "first token ms": lambda row: milliseconds(row, "first_token"),
        "tokens/s": lambda row: spread(row["tokens_per_second"]),
        f"prefill speed {over}": lambda row: spread(row["speedup"].get("prefill")),
        f"decode speed {over}": lambda row: spread(row["speedup"].get("decode")),
    }
    sizes: dict[str, Callable[[Row], str]] = {
        "cache": lambda row: size(row["sizes"]["measured_bytes"]),
        "predicted cache": lambda row: size(row["sizes"]["predicted_bytes"]),
        "share of DynamicCache": lambda row: share(row["sizes"]),
        "in host memory": lambda row: size(row["sizes"]["host_bytes"] or None),
        "bits per value": lambda row: bits(row["sizes"]),
        "peak of prefill": lambda row: size(row["peak_bytes"]["prefill"]),
        "peak of decode": lambda row: size(row["peak_bytes"]["decode"]),
    }
    yield table_of(name, rows, times)
    yield table_of(f"{MEMORY}, {name}", [row for row in rows if "sizes" in row or "error" in row], sizes)


def table_of(title: str, rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    """Returns a table with a line for each row, without empty columns; a failed row has its failure in the first column."""
    lines = [[failure(row)] if "error" in row else [shown(row) for shown in columns.values()] for row in rows]
    kept = [at for at in range(len(columns)) if not at or any(at < len(line) and line[at] for line in lines)]
    named = [
        [row["name"], *(line[at] if at < len(line) else "" for at in kept)]
        for row, line in zip(rows, lines, strict=True)
    ]
    return Table(title, ["method", *(list(columns)[at] for at in kept)], named, by_layer=True)


def largest_table(run: Run) -> Table:
    """Returns the table of the computed and tried largest batches, with the two numbers of the linear law."""
    header = ["method", "context", "computed", "computed from", "tried", "fixed", "per sequence", "cache per sequence"]
    lines = []
    for row in run["largest"]:
        if "error" in row:
            lines.append([row["name"], str(row["context"]), failure(row), *[""] * 5])
            continue
        law = row["peak"] or row["cache"]
        seen = "" if row["tried"] is None else str(row["tried"])
        by = row["by"] if row["peak"] else "cache alone, at most"
        fixed = "about 0" if law["fixed"] < 0 else spoken_size(law["fixed"])  # 2 a - b, of two measured bytes
        bytes_of = map(spoken_size, (law["per_row"], row["cache"]["per_row"]))
        lines.append([row["name"], str(row["context"]), str(row["computed"]), by, seen, fixed, *bytes_of])
    limit = spoken_size(run["config"]["memory"])
    return Table(f"{LARGEST} in {limit}", header, lines, by_layer=True)


def too_small(run: Run) -> Iterator[str]:
    """Yields a line for each row and context for which not even a batch of 1 fits into the limit."""
    weights = run["model"]["bytes"]
    for row in run["largest"]:
        if "error" not in row and row["computed"] < 1 and not row["tried"]:
            need = weights + sum((row["peak"] or row["cache"]).values())
            yield (
                f"{row['name']}, {row['context']} tokens: not even a batch of 1 fits into "
                f"{spoken_size(run['config']['memory'])}; it takes {spoken_size(need)}, of which the model's weights are "
                f"{spoken_size(weights)}"
            )


def failures(run: Run) -> Iterator[str]:
    """Yields a line for each row that could not be measured."""
    for row in (*run["cells"], *run["largest"]):
        if "error" in row:
            where = (
                f"{row['batch']} x {row['context']} tokens" if "batch" in row else f"largest batch of {row['context']}"
            )
            yield f"{row['name']}, {where}: {failure(row)}: {row['error']}"


def failure(row: Row) -> str:
    """Returns "out of memory" or "failed"."""
    return NO_ROOM if row["out_of_memory"] else FAILED


def milliseconds(row: Row, kind: str) -> str:
    """Returns the median of a row's times of one kind, in milliseconds."""
    return number(1e3 * row["seconds"][kind][1])


def spread(values: Sequence[float] | None) -> str:
    """Returns the median with its quartiles as text; "" if there are none."""
    if values is None:
        return ""
    low, middle, high = map(number, values)
    return f"{middle} [{low}, {high}]"


def share(sizes: Mapping[str, Any]) -> str:
    """Returns the share of the bytes of a `DynamicCache` for the same tokens as text; "" if unknown."""
    dynamic = sizes.get("dynamic_bytes")
    return "" if dynamic is None else f"{sizes['share_of_dynamic']:.1%} of {spoken_size(dynamic)}"


def bits(sizes: Mapping[str, Any]) -> str:
    """Returns bits per value as text, with a note if nothing is encoded yet."""
    return f"{sizes['bits_per_value']:.2f}" + ("" if is_encoded(sizes) else f" ({UNENCODED})")


def size(value: float | None) -> str:
    """Returns a size as text; "" if unknown."""
    return "" if value is None else spoken_size(value)
