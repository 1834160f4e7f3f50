"""Thousands of damaged blobs of stored chunks, each decoded, or put into a prefix file that is loaded and used for a few steps.

    python tests/hostile/campaign_blobs.py --cases 10000 --seed 1 --json blobs.json
    python tests/hostile/campaign_blobs.py --seed 1 --only 1234     # repeats one case, with its traceback

A blob must be refused by a `BlobError` of one line, with nothing written to `out`, or be decoded to finite numbers; a prefix file
must be refused by a `PrefixError` or give finite logits. Some of the files (`cache.save(..., storage_bits=...)`) are good except
for one damaged blob, others are damaged as in `campaign_prefixes.py`.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import damaged_prefixes
from cases import calibrated_artifact
from damaged_blobs import damaged
from hostile_cases import Done, command, counted, limited
from joint_chunks import usual, with_storage
from saved_prefixes import Base, File
from stored_chunks import chunk_of
from toy_models import random_model

from calib.runtime import Artifact, BlobError, Codec
from tests.hostile.campaign_prefixes import outcome

TOKENS = 9
FILES = 0.2  # share of the cases that are prefix files
TIMES = 64  # allowed memory in multiples of a blob: a chunk is many times as large, and codes are unpacked in float64
# Options of a codec, dtype of a chunk, and its first position: code formats, slices of heads, exact tokens, fixed sizes, profiles.
BASES: list[tuple[dict[str, Any], torch.dtype, int]] = [
    ({"bits": 2, "size": True}, torch.float32, 2),
    ({"bits": 1, "size": False, "predict": False}, torch.bfloat16, 0),
    ({"bits": 2.5, "size": True, "predict": False}, torch.float16, 100),
    ({"bits": 2, "size": True, "heads": range(1)}, torch.float32, 0),
    ({"bits": 2, "size": True, "trellis": True, "heads": range(1, 2)}, torch.bfloat16, 70_001),
    ({"bits": 3, "fixed_size": True}, torch.bfloat16, 900),
    ({"bits": 2, "sinks": 0}, torch.float16, 0),
    ({"bits": 2, "profile": "storage"}, torch.float32, 2),
    ({"bits": 2.5, "profile": "storage", "entropy": True}, torch.bfloat16, 3),
    ({"bits": 4, "profile": "storage", "entropy": True, "sinks": 0}, torch.float32, 0),
]
# Cases whose methods load files of blobs: an ordered store, components, a packed and an exact copy of each token, sparse codes.
LOADED = ("kivi-2-clipped", "klt-short", "specache-rotated", "csr-offline")


@dataclass(frozen=True)
class Whole:
    """An undamaged blob, and the codec that encoded it."""

    codec: Codec
    data: bytes
    dtype: torch.dtype


def wholes(artifact: Artifact) -> list[Whole]:
    """Encode an undamaged blob for each of `BASES`, and check that it is accepted."""
    found, model = [], random_model("llama")
    for options, dtype, start in BASES:
        codec = Codec.from_artifact(artifact, **{"profile": "heads", **options})
        chunk = usual(codec, TOKENS).to(dtype) if options.get("entropy") else chunk_of(model, TOKENS, dtype=dtype)
        chunk = chunk.unflatten(-1, (codec.kv_heads, codec.head_dim))
        blob = codec.encode(chunk[..., codec.heads.start : codec.heads.stop, :].flatten(3), start)
        assert not options.get("entropy") or len(blob) < codec.size(TOKENS, start, dtype)
        found.append(Whole(codec, blob.numpy().tobytes(), dtype))
        assert decoded(found[-1], found[-1].data, Random(0))[0] == "accepted"
    return found


def decoded(base: Whole, data: bytes, draw: Random) -> tuple[str, str]:
    """Decode a blob, given as any kind of bytes; return one of OUTCOMES and the message."""
    given: Any = draw.choice([bytes, bytearray, memoryview])(data)
    if draw.random() < 0.25:
        given = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
    # Half of the cases decode into `out`; in the others `decode` allocates the chunk.
    out = torch.full((2, base.codec.layers, TOKENS, len(base.codec.heads) * base.codec.head_dim), 7.0, dtype=base.dtype)
    into = draw.random() < 0.5

    def use() -> tuple[str, str]:
        found = base.codec.decode(given, out=out) if into else base.codec.decode(given)
        return ("accepted", "") if bool(found.isfinite().all()) else ("nan", "a chunk that is not finite")

    kind, told = limited(partial(fitting, use), len(data), BlobError, times=TIMES)
    if kind == "refused" and not bool((out == 7).all()):
        return "tracebacks", f"refused, and written to out: {told}"
    return kind, told


def fitting(use: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Turn the ValueError of an `out` that does not fit into a BlobError: an undamaged blob of other tokens or another dtype than
    `out` is a mistake of the caller, and counts as refused."""
    try:
        return use()
    except BlobError:
        raise
    except ValueError as error:
        if not str(error).startswith("out is "):
            raise
        raise BlobError(str(error)) from error


def with_blob(base: Base, blobs: list[bytes], draw: Random) -> tuple[bytes, str]:
    """A prefix file with a damaged blob for one of its rows, and otherwise correct, with a description."""
    file = File.of(base.data)
    row = draw.randrange(len(blobs))
    data, done = damaged(blobs[row], draw.choice(blobs), draw)
    file.tensors[f"chunks/{row}"] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
    return file.data(), f"blob of row {row} {done}"


def blobs_of(base: Base) -> list[bytes]:
    """The blobs of a prefix file."""
    tensors = File.of(base.data).tensors
    return [tensors[name].numpy().tobytes() for name in sorted(tensors) if name.startswith("chunks/")]


def campaign(
    cases: range, seed: int, tell: Callable[[int, Done], None] | None = None, *, files: float = FILES
) -> dict[str, Any]:
    """Run the cases; return the counts of `hostile_cases.counted`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.safetensors"
        whole = wholes(with_storage(calibrated_artifact(random_model("llama"))))
        saved = [Base.saved(case, "llama", 1.0, Path(folder), storage_bits=2) for case in LOADED if files]
        for base in saved:
            path.write_bytes(base.data)
            assert outcome(base, path, len(base.data))[0] == "accepted", base.case

        def one(number: int, draw: Random) -> Done:
            if draw.random() < files:
                base = draw.choice(saved)
                data, done = draw.choice(
                    [partial(with_blob, base, blobs_of(base)), partial(damaged_prefixes.damaged, base)]
                )(draw)
                path.write_bytes(data)
                return Done(f"a file for {base.case}", done, *outcome(base, path, len(data)))
            blob = whole[number % len(whole)]
            data, done = damaged(blob.data, draw.choice(whole).data, draw)
            return Done(f"a blob of {BASES[number % len(whole)]}", done, *decoded(blob, data, draw))

        return counted(cases, seed, one, tell)


if __name__ == "__main__":
    sys.exit(command(__doc__, 10_000, campaign))
