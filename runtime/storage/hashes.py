"""Two hashes in a blob's header, 16 bytes each, that identify the origin of its codes: the artifact, and the allocation of bits."""

from calib.runtime.artifact.artifact import Artifact
from calib.runtime.artifact.component_bits import ROLES, Allocation
from calib.runtime.artifact.components import Coding
from calib.runtime.artifact.file import digest
from calib.runtime.artifact.transform_tensors import KINDS, PREDICTED, STORAGE
from calib.runtime.files import canonical_json

HASH_BYTES = 16


def artifact_hash(artifact: Artifact, coding: Coding) -> bytes:
    """Hash of the artifact's model, of all its tensors on which codes depend, and of whether levels are trellis-coded."""
    names = {coding.name(role, kind) for role in ROLES for kind in KINDS}
    if coding.joint:
        names |= {f"{stream}.matrix" for stream in STORAGE}
    elif coding.predict:
        names.add(f"{PREDICTED}.matrix")
    tensors = {name: digest(artifact.tensor(name)) for name in names}
    levels = {"levels": "trellis"} if coding.trellis else {}
    return _hashed({"model": artifact.fingerprint, "tensors": tensors, **levels})


def layout_hash(allocation: Allocation, tables: bytes | None) -> bytes:
    """Hash of the words of every layer's keys and values, and of the `tables` of an entropy coder (`EntropyCoder.identity`).

    They follow from the artifact and the budget, except that sums may be rounded differently on another machine: if that changes
    the allocation, the blob is refused, not misread.
    """
    words: dict[str, object] = {
        role: [[list(own.widths), list(own.counts)] for own in streams] for role, streams in allocation.streams.items()
    }
    return _hashed(words if tables is None else words | {"tables": tables.hex()})


def _hashed(document: object) -> bytes:
    return bytes.fromhex(canonical_json.sha256(document))[:HASH_BYTES]
