"""Damaged files of saved caches, from a seeded generator."""

import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from prefix_numbers import all_seen, document, number, pages, part, renamed, shape_of_heads
from saved_prefixes import DTYPES, Base, File

from calib.runtime.prefix.file import KEY

FLOATS = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, -1e30, 65504.0, -65504.0, 1e-45, 0.0, -0.0]


# ---- changes of tensors and of the file's bytes; `prefix_numbers` has changes of numbers and names


def floats(file: File, draw: Random) -> None:
    """Replace some or all entries of tensors of floats by an extreme number, an infinity or NaN."""
    named = sorted(name for name, tensor in file.tensors.items() if tensor.is_floating_point() and tensor.numel())
    for chosen in draw.sample(named, min(len(named), draw.choice([1, 1, 2, 10**6]))):
        tensor = file.tensors[chosen].view(-1)
        limit = torch.finfo(tensor.dtype).max
        value = draw.choice(FLOATS)
        value = max(-limit, min(limit, value)) if math.isfinite(value) else value
        if draw.random() < 0.3:
            tensor.fill_(value)
        else:
            tensor[[draw.randrange(tensor.numel()) for _ in range(draw.choice([1, 5, 50]))]] = value


def bits(file: File, draw: Random) -> None:
    """Replace bytes of a tensor, more often of codes and indices than of floats."""
    chosen = draw.choice(sorted(name for name, tensor in file.tensors.items() if tensor.numel()))
    tensor = file.tensors[chosen]
    if tensor.is_floating_point() and draw.random() < 0.5:
        chosen = draw.choice(
            sorted(n for n, t in file.tensors.items() if t.numel() and not t.is_floating_point()) or [chosen]
        )
        tensor = file.tensors[chosen]
    raw = tensor.view(-1).view(torch.uint8)
    kind = draw.randrange(3)
    if kind == 0:
        raw.copy_(torch.frombuffer(bytearray(draw.randbytes(len(raw))), dtype=torch.uint8))
    elif kind == 1:
        raw.fill_(draw.choice([0, 0x7F, 0x80, 0xFF]))
    else:
        raw[[draw.randrange(len(raw)) for _ in range(draw.choice([1, 10]))]] = draw.randrange(256)


def indices(file: File, draw: Random) -> None:
    """Replace entries of stored indices: tokens, channels, positions, atoms, fetched tokens."""
    telling = (
        "indices",
        "tokens",
        "channels",
        "positions",
        "speculative_tokens",
        "input_ids",
        "fetched",
        "overflowed_outliers",
    )
    named = sorted(
        name for name, t in file.tensors.items() if t.numel() and not t.is_floating_point() and name.endswith(telling)
    )
    if not named:
        bits(file, draw)
        return
    tensor = file.tensors[draw.choice(named)].view(-1)
    limits = torch.iinfo(tensor.dtype)
    value = draw.choice([limits.max, limits.min, -1, -2, 1, 100, 127, 1000, 10**6])
    value = max(limits.min, min(limits.max, value))
    if draw.random() < 0.4:
        tensor.fill_(value)
    else:
        tensor[[draw.randrange(tensor.numel()) for _ in range(draw.choice([1, 10]))]] = value


def shape(file: File, draw: Random) -> None:
    """Change the shape or dtype of a tensor, or exchange two tensors."""
    chosen = draw.choice(sorted(file.tensors))
    tensor = file.tensors[chosen]
    kind = draw.randrange(7)
    if kind == 0 and tensor.ndim:
        axis = draw.randrange(tensor.ndim)
        file.tensors[chosen] = tensor.narrow(axis, 0, draw.randrange(tensor.shape[axis] + 1)).clone()
    elif kind == 1 and tensor.ndim:
        axis = draw.randrange(tensor.ndim)
        file.tensors[chosen] = torch.cat([tensor, tensor], axis)
    elif kind == 2:
        file.tensors[chosen] = tensor[None]
    elif kind == 3:
        file.tensors[chosen] = tensor.reshape(-1)
    elif kind == 4:
        file.tensors[chosen] = tensor.to(draw.choice(list(DTYPES.values())))
    elif kind == 5:
        other = draw.choice(sorted(file.tensors))
        file.tensors[chosen], file.tensors[other] = file.tensors[other], tensor
    else:
        file.tensors[chosen] = torch.zeros(draw.choice([(), (0,), (1,), (1,) * 40, (2, 0, 3)]), dtype=tensor.dtype)


def other_dtype(file: File, draw: Random) -> None:
    """Convert all floats of a layer (or of all layers) to another dtype, and change the document's dtypes and flags to match."""
    layer = draw.choice(["layers/0/", "layers/1/", "layers/"])
    to = draw.choice([torch.float64, torch.float16, torch.bfloat16, torch.float32])
    wide = draw.random() < 0.5
    for name, tensor in file.tensors.items():
        if name.startswith(layer) and tensor.is_floating_point():
            file.tensors[name] = tensor.to(to)
    for name, value in file.document["numbers"].items():
        if name.startswith(layer) and name.endswith("dtype"):
            file.document["numbers"][name] = str(to).removeprefix("torch.")
        if name.startswith(layer) and type(value) is bool:
            file.document["numbers"][name] = wide


def other_batch(file: File, draw: Random) -> None:
    """Change the number of batch rows in every list of the document and every tensor that has one entry for each row."""
    rows = len(file.document["numbers"]["rows/lengths"])
    count = draw.choice([0, 1, 3, 40])

    def resized(values: list[Any]) -> list[Any]:
        return [values[i % len(values)] for i in range(count)]

    for name, value in file.document["numbers"].items():
        if isinstance(value, list) and len(value) == rows and not name.endswith("_shape"):
            file.document["numbers"][name] = resized(value)
    for name, tensor in file.tensors.items():
        if tensor.ndim and tensor.shape[0] == rows and "/pages/" not in name and "/records/" not in name:
            file.tensors[name] = tensor[resized(list(range(rows)))] if tensor.numel() < 10**5 else tensor


def header(file: File, draw: Random) -> None:
    """Change the safetensors header alone: shapes, dtypes and offsets that contradict the tensors, wrong metadata."""
    chosen = draw.choice(sorted(file.tensors))
    kind = draw.randrange(8)

    def change(found: dict[str, Any]) -> None:
        entry = found[chosen]
        if kind == 0:
            entry["shape"] = draw.choice(
                [[-1], [2**63], [2**64], [2**62, 4], [0, 2**62, 2**62], [1] * 100, ["a"], 3, None]
            )
        elif kind == 1:
            entry["dtype"] = draw.choice(["F8_E4M3", "F4", "C64", "U64", "I8", "nothing", "", 3, None])
        elif kind == 2:
            entry["data_offsets"] = draw.choice([[0, 0], [-1, 5], [5, 1], [0, 2**63], [2**64 - 1, 2**64], [0], "x"])
        elif kind == 3:
            found["__metadata__"] = draw.choice([None, [], {}, {KEY: 3}, {KEY: None}, {"other": "x"}, "x"])
        elif kind == 4:
            found["__metadata__"][KEY] = draw.choice(
                ["", "{", "null", "[1]", "3", '"x"', "{}", "[" * 10**5, '{"a":' * 5000]
            )
        elif kind == 5:
            found["__metadata__"]["more"] = "x" * 10_000
        elif kind == 6:
            deep: Any = 1
            for _ in range(draw.choice([50, 130, 900])):
                deep = [deep]
            entry["more"] = deep
        else:
            entry["shape"] = [1] * draw.choice([65, 300]) + entry["shape"]

    file.header.append(change)


def flipped(file: File, draw: Random) -> None:
    """Change a few bytes of the file."""
    positions = [draw.random() ** draw.choice([1, 4]) for _ in range(draw.choice([1, 1, 3, 20]))]
    with_bits = [draw.randrange(1, 256) for _ in positions]

    def edit(data: bytes) -> bytes:
        changed = bytearray(data)
        for position, mask in zip(positions, with_bits, strict=True):
            changed[int(position * len(data))] ^= mask
        return bytes(changed)

    file.raw.append(edit)


def cut(file: File, draw: Random) -> None:
    """Truncate the file, append to it, overwrite its first bytes, or change the length of its header."""
    kind, share = draw.randrange(5), draw.random()
    more = draw.randbytes(draw.choice([1, 8, 1000]))
    length = draw.choice([0, 1, 7, 10**6, 10**8, 10**9, 2**31, 2**63, 2**64 - 1])
    edits: list[Callable[[bytes], bytes]] = [
        lambda data: data[: int(share * len(data))],
        lambda data: data[: int(share * 20)],
        lambda data: data + more,
        lambda data: struct.pack("<Q", length) + data[8:],
        lambda data: data[:8] + more + data[8 + len(more) :],
    ]
    file.raw.append(edits[kind])


SEALED = [number, number, number, pages, pages, renamed, part, floats, floats, bits, indices, indices, shape, all_seen]
SEALED += [shape_of_heads, other_dtype, other_batch, document]
OUTSIDE = [header, flipped, cut]


def damaged(base: Base, draw: Random) -> tuple[bytes, str]:
    """Return a damaged copy of the file and the names of the changes; all but those in OUTSIDE keep the checksums correct."""
    file, done = File.of(base.data), []
    outside = draw.random() < 0.2
    for change in [draw.choice(OUTSIDE)] if outside else draw.sample(SEALED, draw.choice([1, 1, 1, 2, 3])):
        done.append(change.__name__)
        try:
            change(file, draw)
        except (AttributeError, TypeError, IndexError, KeyError, ValueError):
            done[-1] += " (nothing left to change)"  # by what was done before
    return file.data(), ", ".join(done)
