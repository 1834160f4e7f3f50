"""Reads the records that an offline W&B run has written to its file."""

import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
HEADER = 7  # bytes of a record's checksum, length and type (LevelDB's log format); the file begins with 7 other bytes


def records(path: Path) -> Iterator[Record]:
    """The records of a `run-*.wandb` file, in order."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, whole = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:  # too little is left of the block for a header
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        whole += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # complete, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def only_run(folder: Path) -> list[Record]:
    """The records of the one offline run below `folder`."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return list(records(path))
