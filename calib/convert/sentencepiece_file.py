"""A SentencePiece model file (a protocol buffer), as far as its byte pair encoding can be rebuilt from it.

Fields, by number (sentencepiece_model.proto): the model has pieces (1), the trainer's settings (2) and the normaliser's (3).
A piece has its text (1), score (2) and kind (3); the trainer's settings the algorithm (3: 1 unigram, 2 BPE) and whether
unknown characters fall back to bytes (35); the normaliser's a map of characters (2), whether a space is put in front (3)
and whether spaces are stripped and joined (4). What is left out has the value that the format gives it.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from calib.errors import UsageError

BPE = 2


class Kind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """A token: its text (a space is written U+2581), its score (the higher, the earlier it is joined) and its kind."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class SentencePieceFile:
    """What the file says; a piece's place in `pieces` is its token number.

    Attributes:
        pieces: the vocabulary.
        byte_fallback: unknown characters are spelled in bytes.
        prefix: a space is put in front of a text.
        strip: spaces around a text are dropped, those within joined into one.
    """

    pieces: tuple[Piece, ...]
    byte_fallback: bool
    prefix: bool
    strip: bool

    @staticmethod
    def read(path: Path) -> "SentencePieceFile":
        """Reads a file; UsageError where it is none, is no byte pair encoding, or maps characters."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read '{path}' ({error.strerror}); give the whole checkpoint") from error
        try:
            fields = list(messages(content))
            pieces = tuple(piece(value) for number, value in fields if number == 1)
            trainer, normaliser = (
                dict(entry for part, value in fields if part == number for entry in messages(value))
                for number in (2, 3)
            )
        except (IndexError, ValueError, struct.error) as error:
            raise UsageError(f"'{path}' is no SentencePiece model ({error}); download it again") from error
        if not pieces or trainer.get(3, 1) != BPE or normaliser.get(2):
            found = "has no pieces" if not pieces else "is no byte pair encoding, or maps characters to others"
            raise UsageError(f"'{path}' {found}, which cannot be rebuilt; give the tokenizer.model of Baichuan2")
        return SentencePieceFile(
            pieces, bool(trainer.get(35, 0)), bool(normaliser.get(3, 1)), bool(normaliser.get(4, 1))
        )


def piece(message: int | bytes) -> Piece:
    """One entry of the vocabulary."""
    found = dict(messages(message))
    text, score, kind = found.get(1), found.get(2, bytes(4)), found.get(3, Kind.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece without text")
    return Piece(text.decode(), struct.unpack("<f", score)[0], Kind(kind))


def messages(content: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: whole numbers, or bytes (texts, messages, and numbers of fixed width)."""
    if isinstance(content, int):
        raise ValueError("a number where a message is expected")
    place = 0

    def varint() -> int:
        nonlocal place
        number = shift = 0
        while True:
            byte = content[place]
            place, number, shift = place + 1, number | (byte & 127) << shift, shift + 7
            if byte < 128:
                return number

    while place < len(content):
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        width = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        if place + width > len(content):
            raise ValueError("it ends within a field")
        yield number, content[place : place + width]
        place += width
