"""Artifacts with one thing wrong, drawn from a seed: bytes, headers, documents and numbers, most with every checksum right.

case = damaged(base, seed=7, number=12)    # the same case at every call
case.data, case.words, case.names          # the file, the changes in words, the tensors that were changed
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from damaged_numbers import CHANGES
from forged_artifact import forged, join, split
from torch import Tensor

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.file import encode
from calib.runtime.files import canonical_json
from calib.runtime.methods import METHODS

TEXTS = ("", "x", "\x1b]0;title\x07", "a\nb", "\ud800", "\u202e", "\x00", "NaN", "../..", "<script>", "7" * 5000)
# Prefixes or parts of names of tensors that belong together (one transform, one range) and are changed alike.
TOGETHER = (
    *(
        "keys.klt.",
        "values.klt.",
        "keys.klt.before.",
        "values.klt.predicted.",
        "keys.klt",
        "outliers",
        "keys.",
        "values.",
    ),
    "klt.",
)


@dataclass
class Damaged:
    """One case: the file, its damage in words, and the names of the tensors that are damaged."""

    data: bytes
    words: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Base:
    """A good artifact and its file, from which damaged ones are made."""

    artifact: Artifact
    data: bytes

    @classmethod
    def of(cls, artifact: Artifact) -> "Base":
        """From a good artifact."""
        return cls(artifact, artifact.encoded())

    def document(self) -> dict[str, Any]:
        """A copy of the document that `encode` takes beside the tensors."""
        found = self.artifact
        parts = {"fingerprint": found.fingerprint, "provenance": found.provenance, "clip_bits": list(found.clip_bits)}
        return canonical_json.plain(parts, "document")


def damaged(base: Base, seed: int, number: int) -> Damaged:
    """Case `number` of a campaign with this seed."""
    draw = random.Random(f"{seed}/{number}")
    kinds: list[tuple[Callable[[Base, random.Random], Damaged], int]] = [
        (wrong_numbers, 10),
        (wrong_document, 5),
        (wrong_tuning, 2),
        (wrong_header, 4),
        (wrong_bytes, 3),
    ]
    (make,) = draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
    return make(base, draw)


# ---- bytes


def wrong_bytes(base: Base, draw: random.Random) -> Damaged:
    """Flip, cut, append, blank, repeat or remove bytes; checksums are not corrected."""
    data, header = bytearray(base.data), 8 + int.from_bytes(base.data[:8], "little")
    how = draw.choice(["flip", "flip in the header", "length", "cut", "append", "blank", "repeat", "remove"])
    at = draw.randrange(len(data))
    size = draw.choice([1, 7, 8, 64, 1000])
    if how == "flip":
        for position in [at, *(draw.randrange(len(data)) for _ in range(draw.choice([0, 1, 10])))]:
            data[position] ^= 1 << draw.randrange(8)
    elif how == "flip in the header":
        for _ in range(draw.choice([1, 1, 3, 30])):
            data[draw.randrange(header)] = draw.randrange(256)
    elif how == "length":
        data[:8] = draw.choice([0, 1, header, len(data), 2**31, 2**63 - 1, 2**64 - 1]).to_bytes(8, "little")
    elif how == "cut":
        del data[at:]
    elif how == "append":
        data += bytes(draw.choice([1, 8, 4096]))
    elif how == "blank":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif how == "repeat":
        data[at:at] = data[at : at + size]
    else:
        del data[at : at + size]
    return Damaged(bytes(data), [f"bytes: {how} at {at}"])


# ---- the header


def wrong_header(base: Base, draw: random.Random) -> Damaged:
    """Change a tensor's entry in the safetensors header, usually in the metadata's document as well; or other metadata."""
    header, _ = split(base.data)
    name = draw.choice([one for one in header if one != "__metadata__"])
    how, value = draw.choice(["shape", "dtype", "data_offsets", "name", "entry", "more", "version"]), anything(draw)
    if how == "shape":
        value = draw.choice([value, wrong_shape(header[name]["shape"], draw)])
    elif how == "dtype":
        value = draw.choice([value, draw.choice(["F64", "F16", "I64", "BOOL", "F8_E4M3", "C64", "f32"])])
    elif how == "data_offsets":
        own = header[name]["data_offsets"]
        value = draw.choice([value, own[::-1], [own[0] - 4, own[1]], [own[0], own[1] + 4], [0, 2**63], [-1, -1]])
    both, data = draw.random() < 0.8, base.data

    def change(entries: dict[str, Any]) -> None:
        if how == "name":
            entries[text(draw_again())] = entries.pop(name)
        elif how == "entry":
            entries[name] = value
        elif how == "more":
            entries[name]["note"] = value
        elif how != "version":
            entries[name][how] = value

    def draw_again() -> random.Random:
        return random.Random(f"{name}{how}")

    if both and how != "data_offsets":
        data = forged(data, lambda document: change(document["tensors"]))
    header, body = split(data)
    change(header)
    if how == "version":
        header["__metadata__"][draw.choice(["format_version", "calib", "note"])] = value
    return Damaged(join(header, body), [f"header: {how} of {name!r} is {value!r:.80}"], [name])


def wrong_shape(shape: list[int], draw: random.Random) -> list[Any]:
    """Another shape, with the same number of entries or another."""
    made = [*shape]
    how = draw.randrange(7)
    if how == 0:
        made = [1] * draw.choice([1, 9, 65, 300]) + made
    elif how == 1 and made:
        made[draw.randrange(len(made))] = draw.choice([0, -1, 2**31, 2**62, 2**63, 2**200, 1.5, True])
    elif how == 2:
        made = made[::-1]
    elif how == 3:
        made = [torch.Size(made).numel()]
    elif how == 4:
        made = [-size for size in made]
    elif how == 5:
        made = [*made, 0]
    else:
        draw.shuffle(made)
    return made


# ---- the document


def wrong_document(base: Base, draw: random.Random) -> Damaged:
    """Replace, remove or add one or three values of the fingerprint, the provenance or the clip bits."""
    document, words = base.document(), []
    for _ in range(draw.choice([1, 1, 1, 3])):
        at, path = document, []
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw.choice(keys)
            path.append(str(key)[:40])
            if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.8:
                at = at[key]
                continue
            how = draw.random()
            if how < 0.15 and isinstance(at, dict):
                del at[key]
            elif how < 0.3 and isinstance(at, dict):
                at[text(draw)] = anything(draw)
            else:
                at[key] = anything(draw)
            break
        words.append(f"document: {'.'.join(path)}")
    if draw.random() < 0.05:
        document["provenance"] = huge(draw)
        words.append("document: huge provenance")
    fingerprint = document.get("fingerprint")
    if isinstance(fingerprint, dict) and draw.random() < 0.7:
        fingerprint["config_hash"] = canonical_json.sha256(fingerprint.get("config"))
    return Damaged(written(base, base.artifact.tensors, document), words)


def wrong_tuning(base: Base, draw: random.Random) -> Damaged:
    """Add a record of `calib tune` and metrics, with one value that no run writes."""
    document, layers = base.document(), base.artifact.fingerprint["layers"]
    method = draw.choice([name for name in METHODS if hasattr(METHODS[name], "grid")])
    choice = {
        "method": method,
        "budget": 2.5,
        "options": {},
        "layers": [{}] * layers,
        "predicted": {"bits": 2.5, "loss": 0.1, "layers": [{"bits": 2.5, "loss": 0.1}] * layers, "uniform": None},
        "measured_on": {"text": "x", "seed": 7},
    }
    figures = {"stream": "keys", "group": 0, "initial_loss": 0.2, "loss": 0.1, "epochs": 3, "dead": 0}
    metrics = {"layers": [{"layer": 0, "error": 0.1}], "dictionaries": [figures], "total": 0.2}
    options = choice["options"]
    where = draw.choice([*[options] * 5, choice, choice["predicted"], figures, metrics, metrics["layers"][0]])
    key = draw.choice([one.name for one in fields(METHODS[method])] if where is options else [*where, "note"])
    where[key] = anything(draw) if draw.random() < 0.7 else [where.get(key)] * draw.choice([0, 1, 1000])
    document["provenance"] |= {"tuned": {"version": 1, "choices": [choice]}, "metrics": metrics}
    return Damaged(
        written(base, base.artifact.tensors, document), [f"{method} tuned, or metrics: {key}"], ["tuned", method]
    )


def anything(draw: random.Random, deep: int = 2) -> Any:
    """A random JSON value of any type, nested up to `deep` levels, or sometimes up to 100."""
    how = draw.randrange(9 if deep else 6)
    if how == 0:
        return draw.choice([None, True, False])
    if how in (1, 2):
        return draw.choice([0, 1, -1, 2, 3, 2**31, 2**63, -(2**63), 10**400, 10**4000, draw.randrange(100)])
    if how == 3:
        return draw.choice([0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, 1.5])
    if how in (4, 5):
        return text(draw)
    if how == 6:
        return [anything(draw, deep - 1) for _ in range(draw.choice([0, 1, 3]))]
    if how == 7:
        return {text(draw): anything(draw, deep - 1) for _ in range(draw.choice([0, 1, 3]))}
    value: Any = 1
    for _ in range(draw.choice([5, 31, 40, 100])):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def text(draw: random.Random) -> str:
    """A random string, for a name or a value."""
    return draw.choice(TEXTS) + draw.choice(["", "", str(draw.randrange(10))])


def huge(draw: random.Random) -> dict[str, Any]:
    """A document of some megabytes: one text, one list, many keys, or mostly brackets."""
    return draw.choice(
        [
            {"x" * 3_000_000: list(range(100_000))},
            {"note": "\x1b" * 500_000},
            {"list": [[]] * 1_000_000},
            {"metrics": {"layers": [{f"{row}/{n}": 1.0 for n in range(50)} for row in range(2000)]}},
            {str(number): number for number in range(200_000)},
        ]
    )


# ---- numbers


def wrong_numbers(base: Base, draw: random.Random) -> Damaged:
    """Change entries of one tensor, or of several that belong together."""
    tensors = dict(base.artifact.tensors)
    name = draw.choice(sorted(tensors))
    names = [name]
    if draw.random() < 0.25:
        stem = draw.choice(TOGETHER)
        names = [one for one in sorted(tensors) if one.startswith(stem) or stem in one]
        names = draw.sample(names, draw.randint(1, min(4, len(names))))
    how = draw.choice(list(CHANGES))
    state = draw.getrandbits(62)
    for one in names:  # the same draw for all: a range or a transform changed as one
        tensors[one] = CHANGES[how](tensors[one], random.Random(state)).contiguous()
    if draw.random() < 0.05:
        del tensors[draw.choice(sorted(tensors))]
    words = [f"numbers: {how} in {', '.join(names)}"]
    return Damaged(written(base, tensors, base.document()), words, names)


def written(base: Base, tensors: dict[str, Tensor], document: dict[str, Any]) -> bytes:
    """A file of these tensors and this document, with correct checksums."""
    document = {**base.document(), **document}
    return encode({name: tensors[name] for name in sorted(tensors)}, document)
