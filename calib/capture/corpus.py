"""Turns text into token sequences of equal length, chosen by a seed, with held-out ones kept apart."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from calib.capture.language_model import without_notes
from calib.errors import UsageError

CHARACTERS_PER_TOKEN = 6  # more than prose has on average, so that a block of text fills a sequence


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token sequences and their origin.

    Attributes:
        train: int64 `[sequences, length]`, on which statistics are measured.
        heldout: int64 `[heldout_sequences, length]`, on which errors are reported; no sequence is in both.
        origin: name, hash of the text and so on: plain JSON for the artifact's provenance, without folders.
    """

    train: Tensor
    heldout: Tensor
    origin: dict[str, Any]

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.train.shape[1]


def text_files(paths: list[str]) -> list[Path]:
    """Returns the named files, with folders replaced by all files in them (recursive, sorted, without hidden ones).

    Raises UsageError for a path that does not exist, or a folder without files.
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise UsageError(f"data.text: no file or folder '{name}'")
        inside = sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith("."))
        if path.is_dir() and not inside:
            raise UsageError(f"data.text: the folder '{name}' holds no file")
        files.extend(inside if path.is_dir() else [path])
    return files


def text_sequences(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int, label: str
) -> Tensor:
    """Returns up to `count` sequences from parts of `text` chosen by `seed`: int64 `[at most count, length]`.

    Raises UsageError if the text does not fill a single sequence; `label` names the corpus in the message.
    """
    blocks = text_blocks(text, CHARACTERS_PER_TOKEN * length)
    random.Random(seed).shuffle(blocks)
    with without_notes():  # tokenizers warn that a block is longer than the model's context; it is cut below
        documents = (tokenizer(block, add_special_tokens=False)["input_ids"] for block in blocks)
        sequences = list(pack(documents, tokenizer.bos_token_id, length, count))
    if not sequences:
        tokens = sum(len(tokenizer(block, add_special_tokens=False)["input_ids"]) for block in blocks)
        raise UsageError(
            f"the corpus {label} is too short: {tokens} tokens do not fill one sequence of {length}; "
            "give more text or a smaller data.length"
        )
    return torch.tensor(sequences)


def text_blocks(text: str, characters: int) -> list[str]:
    """Returns the text cut at line ends into blocks of at least `characters`; the last one may be shorter.

    Lines longer than that are cut inside.
    """
    blocks: list[str] = []
    block: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), characters):
            block.append(line[start : start + characters])
            size += len(block[-1])
            if size >= characters:
                blocks.append("".join(block))
                block, size = [], 0
    return [*blocks, "".join(block)] if block else blocks


def pack(documents: Iterator[list[int]], first: int | None, length: int, count: int) -> Iterator[list[int]]:
    """Yields `count` sequences of `length` tokens, fewer if the documents end; each begins with token `first` unless None.

    Documents are concatenated; a remainder too short for a sequence is dropped. Every sequence has the first token (`<s>`)
    because trained models use it as an attention sink, which changes the ranges of keys and values.
    """
    head = [] if first is None else [first]
    room = length - len(head)
    buffer: list[int] = []
    for _ in range(count):
        while len(buffer) < room:
            document = next(documents, None)
            if document is None:
                return
            buffer.extend(document)
        yield head + buffer[:room]
        del buffer[:room]


def divide(sequences: Tensor, wanted: int, wanted_heldout: int, label: str) -> tuple[Tensor, Tensor, list[str]]:
    """Returns (train, held-out, notes for the user): the numbers wanted, or the same proportion if there are too few.

    Raises UsageError if there are fewer than two sequences.
    """
    total = wanted + wanted_heldout
    if len(sequences) < 2:
        raise UsageError(
            f"the corpus {label} is too short: it fills {len(sequences)} sequence of {sequences.shape[1]} tokens, and one for "
            "the statistics and one held out are needed; give more text or a smaller data.length"
        )
    notes = []
    heldout = wanted_heldout
    if len(sequences) < total:
        heldout = min(max(1, round(len(sequences) * wanted_heldout / total)), len(sequences) - 1)
        notes.append(
            f"the corpus {label} fills {len(sequences)} of the {total} sequences asked for: "
            f"{len(sequences) - heldout} are measured, {heldout} held out"
        )
    return sequences[: len(sequences) - heldout], sequences[len(sequences) - heldout :], notes


def token_hash(*parts: Tensor) -> str:
    """Returns the SHA-256 of the token ids (as int64), in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()
