"""The artifact's bytes: one safetensors file, specified in `docs/artifact_format.md`.

`encode` and `decode` are inverse to each other. The same content always gives the same bytes; what `decode` returns has
passed every check that needs no model.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from calib.runtime import canonical_json
from calib.runtime.artifact_error import FIT_AGAIN, ArtifactError

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
KEYS = ("clip_bits", "fingerprint", "provenance", "sha256", "tensors")
LARGEST_HEADER = 100_000_000  # bytes; the limit safetensors itself sets
AGAIN = "copy the file again, or write it anew with `calib fit`"


def encode(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> bytes:
    """The file for CPU `tensors` and `document` (plain JSON: fingerprint, provenance, clip_bits)."""
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "sha256": digest(tensor)}
        for name, tensor in tensors.items()
    }
    document = {**document, "tensors": entries}
    document["sha256"] = canonical_json.sha256(document)
    metadata = {"format_version": FORMAT_VERSION, "calib": canonical_json.dumps(document)}
    data = safetensors.torch.save(dict(tensors), metadata=metadata)
    # safetensors keeps metadata in a hash map whose order changes from run to run: write the header in one spelling.
    (length,) = struct.unpack_from("<Q", data)
    header = canonical_json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def decode(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the document (without the checksums) of a file's bytes; raises `ArtifactError`."""
    header, stored_bytes = read_header(data)
    document = read_document(header.pop("__metadata__", None))
    check_layout(header, document["tensors"], stored_bytes)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"found a damaged safetensors file ({error}); {AGAIN}") from error
    for name, tensor in tensors.items():
        found, expected = digest(tensor), document["tensors"][name]["sha256"]
        if found != expected:
            raise ArtifactError(
                f"tensor {name!r} has sha256 {found[:12]}, expected {str(expected)[:12]}: "
                f"it was changed after the file was written; {AGAIN}"
            )
    return tensors, {key: document[key] for key in ("clip_bits", "fingerprint", "provenance")}


def digest(tensor: Tensor) -> str:
    """Hexadecimal SHA-256 of a CPU tensor's bytes (little endian, row-major), as they stand in the file."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header's JSON object and how many bytes of tensors follow it."""
    alien = "found no safetensors header, expected an artifact of `calib fit`"
    if not data:
        raise ArtifactError(f"found an empty file, expected an artifact; {AGAIN}")
    if data[8:9] not in (b"{", b""):
        raise ArtifactError(f"{alien}; name the .safetensors file it wrote")
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if len(data) < 9 or (len(data) < 8 + length and length <= LARGEST_HEADER):
        raise ArtifactError(
            f"found {len(data)} bytes, expected {8 + max(length, 1)} or more: the file is truncated; {AGAIN}"
        )
    try:
        if length > LARGEST_HEADER:
            raise ValueError(f"header of {length} bytes")
        header = canonical_json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise ArtifactError(f"{alien} ({error}); {AGAIN}") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{alien}; {AGAIN}")
    return header, len(data) - 8 - length


def read_document(metadata: object) -> dict[str, Any]:
    """The checked JSON of the metadata: version, both keys, the checksum, and every field's type."""
    if not isinstance(metadata, dict) or not {"format_version", "calib"} & metadata.keys():
        raise ArtifactError(
            "found a safetensors file without calib metadata (a model's weights?), expected an artifact; "
            "name the file `calib fit` wrote"
        )
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        found = "no format_version" if version is None else f"format_version {version!r}"
        raise ArtifactError(
            f"found {found}, expected {FORMAT_VERSION!r}; use the version of calib that wrote the file, or {FIT_AGAIN}"
        )
    if metadata.keys() != {"format_version", "calib"}:
        raise ArtifactError(
            f"found the metadata keys {sorted(metadata)}, expected ['calib', 'format_version']; {AGAIN}"
        )
    try:
        if not isinstance(metadata["calib"], str):
            raise ValueError("not text")
        document = canonical_json.loads(metadata["calib"])
    except ValueError as error:
        raise ArtifactError(f"the metadata 'calib' is not JSON ({error}); {AGAIN}") from error
    if not isinstance(document, dict) or tuple(sorted(document)) != KEYS:
        found = f"the fields {sorted(document)}" if isinstance(document, dict) else f"a {type(document).__name__}"
        raise ArtifactError(f"the metadata 'calib' holds {found}, expected the fields {list(KEYS)}; {AGAIN}")
    rest = {key: value for key, value in document.items() if key != "sha256"}
    try:
        found_sum = canonical_json.sha256(rest)
    except RecursionError as error:
        raise ArtifactError(f"the metadata 'calib' is nested too deep; {AGAIN}") from error
    if found_sum != document["sha256"]:
        raise ArtifactError(
            f"the metadata has sha256 {found_sum[:12]}, expected {str(document['sha256'])[:12]}: "
            f"it was changed after the file was written; {AGAIN}"
        )
    for key, kind in (("clip_bits", list), ("fingerprint", dict), ("provenance", dict), ("tensors", dict)):
        if not isinstance(document[key], kind):
            raise ArtifactError(
                f"the metadata field {key!r} is a {type(document[key]).__name__}, expected a {kind.__name__}; {AGAIN}"
            )
    return document


def check_layout(header: dict[str, Any], listed: dict[str, Any], stored_bytes: int) -> None:
    """The header's tensors are those the metadata lists, with their dtypes and shapes, and all bytes are there."""
    for name in listed.keys() - header.keys():
        raise ArtifactError(f"tensor {name!r} is missing from the file; {AGAIN}")
    for name in header.keys() - listed.keys():
        raise ArtifactError(f"tensor {name!r} is in the file and not in its metadata; {AGAIN}")
    end = 0
    for name, expected in listed.items():
        found = header[name]
        if not isinstance(expected, dict) or expected.keys() != {"dtype", "shape", "sha256"}:
            raise ArtifactError(
                f"the metadata of tensor {name!r} is {expected!r}, expected dtype, shape and sha256; {AGAIN}"
            )
        for field in ("dtype", "shape"):
            if not isinstance(found, dict) or found.get(field) != expected[field]:
                shown = found.get(field) if isinstance(found, dict) else found
                raise ArtifactError(f"tensor {name!r} has {field} {shown}, expected {expected[field]}; {AGAIN}")
        if expected["dtype"] not in DTYPES.values():
            raise ArtifactError(
                f"tensor {name!r} has dtype {expected['dtype']}, expected one of {', '.join(DTYPES.values())}; {AGAIN}"
            )
        offsets = found.get("data_offsets")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(offset, int) for offset in offsets):
            raise ArtifactError(f"tensor {name!r} has data_offsets {offsets}, expected two integers; {AGAIN}")
        end = max(end, offsets[1])
    if stored_bytes < end:
        raise ArtifactError(f"found {stored_bytes} bytes of tensors, expected {end}: the file is truncated; {AGAIN}")
    if stored_bytes > end:
        raise ArtifactError(f"found {stored_bytes} bytes of tensors, expected {end}: something was appended; {AGAIN}")
