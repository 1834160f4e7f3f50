"""Bits per value by kind of memory: a bar for each method with a segment for each kind, all on one scale."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from calib.evaluate.page.overview import Cell
from calib.evaluate.run_file import Row
from calib.html_page.table import words

COLOURS = 8  # number of colours; the smallest kinds share the last one
HOST, WHOLE = "host memory", "device"


def looks(found: Sequence[Row]) -> dict[str, str]:
    """Returns the CSS class of every kind of memory in a run, the same for all columns; the largest kinds have their own
    colours."""
    total = sum((Counter(bits) for row in found for bits in spent(row.cells.values())), Counter[str]())
    kinds = [kind for kind, _ in total.most_common() if kind != HOST]
    own = kinds if len(kinds) <= COLOURS else kinds[: COLOURS - 1]
    rest = dict.fromkeys(kinds[len(own) :], f"kind-{COLOURS - 1}")
    # Host memory comes last, since it is not part of bits per value.
    return (
        {kind: f"kind-{place}" for place, kind in enumerate(own)}
        | rest
        | ({HOST: "kind-host"} if HOST in total else {})
    )


def memory_bars(found: Sequence[Row], title: str, look: Mapping[str, str]) -> Iterator[str]:
    """Yields the bars of one column with a legend; nothing if no cell has a size."""
    bars = {row.name: bits for row in found if title in row.cells for bits in spent([row.cells[title]])}
    if not bars:
        return
    most = max(sum(bits.values()) for bits in bars.values()) or 1
    names: dict[str, list[str]] = {}
    for kind in (kind for kind in look if any(kind in bits for bits in bars.values())):
        names.setdefault(look[kind], []).append(kind)
    yield '<p class="legend">'
    yield "".join(f'<span><i class="{colour}"></i>{words(", ".join(kinds))}</span>' for colour, kinds in names.items())
    yield '</p><div class="bars">'
    for name, bits in bars.items():
        yield from bar(name, {kind: bits[kind] for kind in look if kind in bits}, look, most)
    yield "</div>"


def spent(cells: Iterable[Cell]) -> Iterator[dict[str, float]]:
    """Yields the bits per value by kind for each cell that was measured."""
    return (pieces(cell) for cell in cells if "sizes" in cell)


def pieces(cell: Cell) -> dict[str, float]:
    """Returns a cell's bits per value by kind of memory. Runs of earlier releases have one kind for the whole device."""
    sizes: Mapping[str, Any] = cell["sizes"]
    bits, measured = sizes["bits_per_value"], sizes["measured_bytes"]
    each = bits / measured if measured else 0.0  # bits per value of one byte
    kinds = sizes.get("by_kind") or {WHOLE: measured}
    known = {kind.replace("_", " "): size * each for kind, size in kinds.items()} | {HOST: sizes["host_bytes"] * each}
    return {kind: amount for kind, amount in known.items() if amount > 0}


def bar(name: str, bits: Mapping[str, float], look: Mapping[str, str], most: float) -> Iterator[str]:
    """Yields a method's bar; the number next to it does not include host memory."""
    listed = ", ".join(f"{kind} {amount:.2f}" for kind, amount in bits.items())
    track = "".join(f'<i class="{look[kind]}" style="width:{100 * bits[kind] / most:.2f}%"></i>' for kind in bits)
    yield f'<div class="bar" title="{words(f"{name}: {listed}")}"><span class="label">{words(name)}</span>'
    yield f'<span class="track">{track}</span>'
    yield f'<span class="loss">{sum(amount for kind, amount in bits.items() if kind != HOST):.2f}</span></div>'
