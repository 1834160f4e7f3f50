"""The artifact's bytes: one safetensors file, specified in `docs/artifact_format.md`.

`encode` and `decode` are inverse to each other. Equal content gives equal bytes. `decode` checks layout, dtypes and checksums;
`Artifact` checks the values.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeGuard

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from calib.runtime.files import canonical_json
from calib.runtime.files.tensor_bytes import tensor_bytes
from calib.runtime.messages.artifact_error import FIT_AGAIN, ArtifactError
from calib.runtime.messages.printable import printable, shortened

FORMAT_VERSION = "1"
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
WIDTHS = {name: dtype.itemsize for dtype, name in DTYPES.items()}
KEYS = ("clip_bits", "fingerprint", "provenance", "sha256", "tensors")
LARGEST_HEADER = 10_000_000  # bytes; a fit of 126 layers has a tenth. Parsed JSON takes many times its length in memory
MOST_TENSORS = 4096
MOST_AXES = 8
LONGEST_NAME = 256  # characters
FOREIGN = 120  # the most characters of another library's message
AGAIN = "copy the file again, or write it anew with `calib fit`"


def encode(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> bytes:
    """Returns the file's bytes for CPU `tensors` and `document` (plain JSON: fingerprint, provenance, clip_bits).

    Raises `ArtifactError` if the header would be longer than `decode` accepts.
    """
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "sha256": digest(tensor)}
        for name, tensor in tensors.items()
    }
    document = {**document, "tensors": entries}
    document["sha256"] = canonical_json.sha256(document)
    metadata = {"format_version": FORMAT_VERSION, "calib": canonical_json.dumps(document)}
    data = safetensors.torch.save(dict(tensors), metadata=metadata)
    # safetensors keeps metadata in a hash map whose order changes from run to run: write the header as canonical JSON.
    (length,) = struct.unpack_from("<Q", data)
    header = canonical_json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    if len(header) > LARGEST_HEADER:
        raise ArtifactError(
            f"names, shapes and provenance take {len(header)} bytes, expected at most {LARGEST_HEADER}; shorten the provenance"
        )
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def decode(file: BinaryIO, size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the document (without the checksums) of a file of `size` bytes; raises `ArtifactError`.

    Tensors are read only after the header was checked, so that a file of a model's weights is refused without reading them.
    """
    header, stored_bytes = read_header(file.read(8 + LARGEST_HEADER), size)
    document = read_document(header.pop("__metadata__", None))
    check_layout(header, document["tensors"], stored_bytes)
    file.seek(0)
    try:
        tensors = safetensors.torch.load(file.read())
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        foreign = shortened(" ".join(str(error).split()), FOREIGN)
        raise ArtifactError(f"found a damaged safetensors file ({foreign}); {AGAIN}") from error
    for name, tensor in tensors.items():
        found, expected = digest(tensor), document["tensors"][name]["sha256"]
        if found != expected:
            raise ArtifactError(
                f"tensor {printable(name)} has sha256 {found[:12]}, expected {beginning(expected)}: "
                f"it was changed after the file was written; {AGAIN}"
            )
    return tensors, {key: document[key] for key in ("clip_bits", "fingerprint", "provenance")}


def digest(tensor: Tensor) -> str:
    """Hexadecimal SHA-256 of a CPU tensor's bytes (little endian, row-major), as they stand in the file."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def beginning(checksum: object) -> str:
    """The first 12 characters of a checksum, for a message; anything else than a checksum as `printable` shows it."""
    return checksum[:12] if isinstance(checksum, str) and checksum.isalnum() else printable(checksum)


def read_header(data: bytes, size: int) -> tuple[dict[str, Any], int]:
    """Returns the header's JSON object and the number of bytes after it, from the first bytes `data` of a file of `size` bytes;
    raises `ArtifactError`."""
    alien = "found no safetensors header, expected an artifact of `calib fit`"
    if not data:
        raise ArtifactError(f"found an empty file, expected an artifact; {AGAIN}")
    if data[8:9] not in (b"{", b""):
        raise ArtifactError(f"{alien}; name the .safetensors file it wrote")
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if size < 9 or (size < 8 + length and length <= LARGEST_HEADER):
        raise ArtifactError(
            f"found {size} bytes, expected {8 + max(length, 1)} or more: the file is truncated; {AGAIN}"
        )
    try:
        if length > LARGEST_HEADER:
            raise ValueError(f"a header of {length} bytes, expected at most {LARGEST_HEADER}")
        header = canonical_json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise ArtifactError(f"{alien} ({shortened(str(error), FOREIGN)}); {AGAIN}") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{alien}; {AGAIN}")
    return header, size - 8 - length


def read_document(metadata: object) -> dict[str, Any]:
    """Returns the JSON in the metadata after checking version, keys, checksum and every field's type; raises `ArtifactError`."""
    if not isinstance(metadata, dict) or not {"format_version", "calib"} & metadata.keys():
        raise ArtifactError(
            "found a safetensors file without calib metadata (a model's weights?), expected an artifact; "
            "name the file `calib fit` wrote"
        )
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        found = "no format_version" if version is None else f"format_version {printable(version)}"
        raise ArtifactError(
            f"found {found}, expected {FORMAT_VERSION!r}; use the version of calib that wrote the file, or {FIT_AGAIN}"
        )
    if metadata.keys() != {"format_version", "calib"}:
        raise ArtifactError(
            f"found the metadata keys {printable(sorted(metadata))}, expected ['calib', 'format_version']; {AGAIN}"
        )
    try:
        if not isinstance(metadata["calib"], str):
            raise ValueError("not text")
        document = canonical_json.loads(metadata["calib"])
    except ValueError as error:
        raise ArtifactError(f"the metadata 'calib' is not JSON ({shortened(str(error), FOREIGN)}); {AGAIN}") from error
    if not isinstance(document, dict) or tuple(sorted(document)) != KEYS:
        found = (
            f"the fields {printable(sorted(document))}"
            if isinstance(document, dict)
            else f"a {type(document).__name__}"
        )
        raise ArtifactError(f"the metadata 'calib' holds {found}, expected the fields {list(KEYS)}; {AGAIN}")
    rest = {key: value for key, value in document.items() if key != "sha256"}
    try:
        found_sum = canonical_json.sha256(rest)
    except RecursionError as error:
        raise ArtifactError(f"the metadata 'calib' is nested too deep; {AGAIN}") from error
    if found_sum != document["sha256"]:
        raise ArtifactError(
            f"the metadata has sha256 {found_sum[:12]}, expected {beginning(document['sha256'])}: "
            f"it was changed after the file was written; {AGAIN}"
        )
    for key, kind in (("clip_bits", list), ("fingerprint", dict), ("provenance", dict), ("tensors", dict)):
        if not isinstance(document[key], kind):
            raise ArtifactError(
                f"the metadata field {key!r} is a {type(document[key]).__name__}, expected a {kind.__name__}; {AGAIN}"
            )
    return document


def check_layout(header: dict[str, Any], listed: dict[str, Any], stored_bytes: int) -> None:
    """Raises `ArtifactError` unless the header has the tensors that the metadata lists, with their dtypes and shapes, and the file
    has exactly their bytes."""
    if len(listed) > MOST_TENSORS:
        raise ArtifactError(f"found {len(listed)} tensors, expected at most {MOST_TENSORS}; {FIT_AGAIN}")
    for name in listed.keys() - header.keys():
        raise ArtifactError(f"tensor {printable(name)} is missing from the file; {AGAIN}")
    for name in header.keys() - listed.keys():
        raise ArtifactError(f"tensor {printable(name)} is in the file and not in its metadata; {AGAIN}")
    end = 0
    for name, expected in listed.items():
        end = max(end, check_entry(name, header[name], expected))
    if stored_bytes < end:
        raise ArtifactError(f"found {stored_bytes} bytes of tensors, expected {end}: the file is truncated; {AGAIN}")
    if stored_bytes > end:
        raise ArtifactError(f"found {stored_bytes} bytes of tensors, expected {end}: something was appended; {AGAIN}")


def check_entry(name: str, found: object, expected: object) -> int:
    """Checks a tensor's entry in the header against the metadata and torch's limits; returns the offset of its end in bytes."""
    shown = printable(name)
    check_name(name)
    if not isinstance(expected, dict) or expected.keys() != {"dtype", "shape", "sha256"}:
        raise ArtifactError(
            f"the metadata of tensor {shown} is {printable(expected)}, expected dtype, shape and sha256; {AGAIN}"
        )
    entry = found if isinstance(found, dict) else {}
    for field in ("dtype", "shape"):
        if field not in entry or entry[field] != expected[field]:
            other = printable(entry.get(field) if entry else found)
            raise ArtifactError(f"tensor {shown} has {field} {other}, expected {printable(expected[field])}; {AGAIN}")
    if expected["dtype"] not in DTYPES.values():
        raise ArtifactError(
            f"tensor {shown} has dtype {printable(expected['dtype'])}, expected one of {', '.join(DTYPES.values())}; {AGAIN}"
        )
    shape, offsets = entry["shape"], entry.get("data_offsets")
    if not is_sizes(shape) or len(shape) > MOST_AXES:
        raise ArtifactError(
            f"tensor {shown} has shape {printable(shape)}, expected at most {MOST_AXES} whole numbers from 0 below 2^63; {AGAIN}"
        )
    if not is_sizes(offsets) or len(offsets) != 2:
        raise ArtifactError(f"tensor {shown} has data_offsets {printable(offsets)}, expected two integers; {AGAIN}")
    needed = math.prod(shape) * WIDTHS[expected["dtype"]]
    if offsets[1] - offsets[0] != needed:
        raise ArtifactError(
            f"tensor {shown} has data_offsets {offsets}, expected {needed} bytes, as its shape {shape} says; {AGAIN}"
        )
    return offsets[1]


def check_name(name: object) -> None:
    """Raises `ArtifactError` unless `name` is valid for a tensor."""
    text = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable()
    if not text or name == "__metadata__":
        raise ArtifactError(
            f"a tensor is named {printable(name)}, expected text such as 'keys.low', of at most {LONGEST_NAME} printable "
            "characters; name the tensor otherwise"
        )


def is_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers that torch can hold, none below 0."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)
