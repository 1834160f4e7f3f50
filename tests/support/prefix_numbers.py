"""Changes of a saved cache's document: its numbers, names and page tables. Each takes a file and a random generator."""

from copy import deepcopy
from random import Random
from typing import Any

import torch
from saved_prefixes import File

# Values that replace a number of the document.
NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 31, 127, 128, 129, 10**3, 10**6, 10**12, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63)),
    *(
        True,
        False,
        None,
        1.5,
        1e308,
        "",
        "1",
        "float16",
        "float64",
        "float8_e4m3fn",
        "int8",
        "\x1b[31m\r\nx",
        "ä" * 500,
    ),
    *([], [1], [-1], [[]], [[0]], [10**6], [10**6, 10**6], [1] * 10_000, ["a"] * 3000, {}, {"a": 1}, {"a": {"b": [1]}}),
]
LEAF_NAMES = [
    "",
    "/",
    "//",
    "..",
    "a/b/c",
    "rows",
    "layers",
    "rows/lengths/x",
    "layers/0/seen/x",
    "x" * 3000,
    "é\x00\n",
]


def any_number(draw: Random) -> Any:
    """A random entry of NUMBERS, copied, so that later changes of it do not affect other cases."""
    return deepcopy(draw.choice(NUMBERS))


def number(file: File, draw: Random) -> None:
    """Replace a number, or an entry of a list of numbers."""
    numbers = file.document["numbers"]
    name = draw.choice(sorted(numbers))
    value = numbers[name]
    while isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        if not isinstance(value[at], list) or draw.random() < 0.2:
            value[at] = another(value[at], draw)
            return
        value = value[at]
    numbers[name] = another(numbers[name], draw)


def another(value: Any, draw: Random) -> Any:
    """A whole number near `value`, or any entry of NUMBERS."""
    if type(value) is int and draw.random() < 0.4:
        return value + draw.choice([-128, -64, -2, -1, 1, 2, 64, 128])
    return any_number(draw)


def all_seen(file: File, draw: Random) -> None:
    """Set the number of seen columns of all layers, and perhaps the lengths of all rows, to one number."""
    value = draw.choice(NUMBERS[:19])
    for name in file.document["numbers"]:
        if name.endswith("/seen"):
            file.document["numbers"][name] = value
    if draw.random() < 0.5:
        lengths = file.document["numbers"]["rows/lengths"]
        file.document["numbers"]["rows/lengths"] = [value] * len(lengths)


def shape_of_heads(file: File, draw: Random) -> None:
    """Replace numbers of heads and channels by others than the model's."""
    for name in file.document["numbers"]:
        if name.endswith("_shape") and draw.random() < 0.7:
            file.document["numbers"][name] = [draw.choice(NUMBERS[:19]), draw.choice(NUMBERS[:19])]


def pages(file: File, draw: Random) -> None:
    """Change a page table: repeat, exchange, add, remove or renumber pages, exchange rows, or change its capacity."""
    numbers = file.document["numbers"]
    table = draw.choice(sorted(name for name in numbers if name.startswith("rows/") and name.endswith("/rows")))
    rows = numbers[table]
    row = draw.choice(rows)
    kind = draw.randrange(7)
    if kind == 0 and len(row) > 1:
        row[draw.randrange(len(row))] = draw.choice(row)
    elif kind == 1:
        draw.shuffle(row)
    elif kind == 2:
        row.append(draw.choice([*row, 0, -1, 10**6]))
    elif kind == 3 and row:
        row.pop(draw.randrange(len(row)))
    elif kind == 4:
        draw.shuffle(rows)
    elif kind == 5 and row:
        row[draw.randrange(len(row))] = draw.choice([-1, -2, 0, 1, 10**9])
    else:
        numbers[table.removesuffix("rows") + "capacity"] = draw.choice(NUMBERS[:19])


def renamed(file: File, draw: Random) -> None:
    """Remove or rename a number or tensor, or add one, perhaps under the name of another as a folder."""
    where: dict[str, Any] = draw.choice([file.document["numbers"], file.tensors])
    other = draw.choice([file.document["numbers"], file.tensors])
    chosen = draw.choice(sorted(where))
    kind = draw.randrange(4)
    if kind == 0:
        del where[chosen]
    elif kind == 1:
        where[draw.choice(LEAF_NAMES)] = where.pop(chosen)
    elif kind == 2:
        below = draw.choice([chosen, draw.choice(sorted(other))]) + draw.choice(["/x", "/0", "/", ""])
        file.document["numbers"][below] = any_number(draw)
    else:
        file.tensors[draw.choice([chosen + "/x", *LEAF_NAMES])] = torch.zeros(draw.choice([(), (0,), (3, 2)]))


def part(file: File, draw: Random) -> None:
    """Remove, replace or add an entry of the document, of its fingerprint or of the record of how it was made."""
    where = draw.choice([file.document, file.document["fingerprint"], file.document["made"]])
    kind = draw.randrange(3)
    key = draw.choice(sorted(where))
    if kind == 0:
        del where[key]
    elif kind == 1:
        where[draw.choice(["more", "", "\x1b[2J", "x" * 2000])] = any_number(draw)
    else:
        where[key] = any_number(draw)


def document(file: File, draw: Random) -> None:
    """Replace large parts of the document by other JSON; checksums are correct."""
    kind = draw.randrange(5)
    if kind == 0:
        file.document["numbers"] = any_number(draw)
    elif kind == 1:
        deep: Any = 1
        for _ in range(draw.choice([30, 200, 800])):
            deep = draw.choice([[deep], {"a": deep}])
        file.document[draw.choice(["numbers", "made", "fingerprint", "stages"])] = deep
    elif kind == 2:
        file.document["numbers"] |= {f"x{number}": number for number in range(20_000)}
    elif kind == 3:
        file.document["fingerprint"]["weights"] = any_number(draw)
    else:
        file.document = draw.choice([[], "x", 3, None, True, {}])
