"""Forged artifact files with correct checksums, and the check that a file is refused with a message of one line."""

import hashlib
import json
import struct

import pytest
import torch
from toy_artifact import toy_model

from calib.runtime.artifact.artifact import Artifact, ArtifactError
from calib.runtime.artifact.fingerprint import fingerprint

REMEDY = ("calib fit", "name the", "flatten it", "permissions", "version of calib")


def refused(path, data: bytes | None = None) -> str:
    """Return the message with which the file is refused; asserts that it is one line with the path, and says what to do."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        Artifact.load(path)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    assert any(words in line for words in REMEDY), line
    return line


def split(data: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def forged(data: bytes, change) -> bytes:
    """The file with `change` applied to its document and a correct checksum, so that only the check of the changed field fails."""
    header, body = split(data)
    document = json.loads(header["__metadata__"]["calib"])
    change(document)
    rest = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    header["__metadata__"]["calib"] = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return join(header, body)


def forged_tensor(name: str, tensor: torch.Tensor) -> bytes:
    """A file with correct checksums that contains one tensor alone, under any name and of any dtype."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = {torch.float32: "F32", torch.float16: "F16", torch.complex64: "C64"}[tensor.dtype]
    entry = {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(raw).hexdigest()}
    document = {"clip_bits": [2], "fingerprint": fingerprint(toy_model()), "provenance": {}, "tensors": {name: entry}}
    empty = join({"__metadata__": {"format_version": "1", "calib": json.dumps(document)}, name: {}}, raw)
    header, _ = split(forged(empty, lambda document: None))
    header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [0, len(raw)]}
    return join(header, raw)
