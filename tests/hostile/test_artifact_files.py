"""Paths and files that are no intact artifact: each raises an `ArtifactError` of one line, no other exception."""

import os
import struct

import pytest
import safetensors.torch
import torch
from forged_artifact import join, refused, split
from toy_artifact import toy_artifact

from calib.runtime.artifact.artifact import Artifact, ArtifactError


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a"
    toy_artifact().save(path)
    return path.read_bytes()


# ---- no file at all


@pytest.mark.parametrize("path", [None, 7, b"a"])
def test_what_is_no_path(path):
    with pytest.raises(ArtifactError, match="expected the path of an artifact; `calib fit` writes one"):
        Artifact.load(path)


def test_missing_file(tmp_path):
    assert "no such file" in refused(tmp_path / "nothing")


def test_folder(tmp_path):
    assert "found a folder" in refused(tmp_path)


def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    assert "not a regular file" in refused(tmp_path / "pipe")


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "cannot be read" in refused(tmp_path / "file" / "a")


def test_unreadable_file(tmp_path, good, monkeypatch):
    def deny(self, mode):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_bytes(good)
    monkeypatch.setattr(type(tmp_path), "open", deny)
    assert "Permission denied" in refused(tmp_path / "a")


def test_a_path_with_a_zero_byte():
    with pytest.raises(ArtifactError, match="null"):
        Artifact.load("a\0b")


# ---- not this kind of file


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + bytes(200),
        b"\x80\x02}q\x00" + b"x" * 200,
        b"a line of text\n" * 20,
        b"{" * 300,
        bytes(300),
        b"\xff" * 300,
        struct.pack("<Q", 8) + b"{broken]" + bytes(64),
        struct.pack("<Q", 8) + b"[1, 2]  " + bytes(64),
        struct.pack("<Q", 2**63) + b"{}" + bytes(64),
        struct.pack("<Q", 100_000) + b'{"a":' * 20_000,
        struct.pack("<Q", 8) + b"\xff" * 8,
    ],
    ids=["zip", "pickle", "text", "braces", "zeros", "ones", "bad json", "list", "huge header", "nested", "not utf-8"],
)
def test_not_safetensors(tmp_path, data):
    line = refused(tmp_path / "a", data)
    assert "expected an artifact of `calib fit`" in line or "truncated" in line


def test_empty_file(tmp_path):
    assert "empty file" in refused(tmp_path / "a", b"")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_models_weights(tmp_path, metadata):
    line = refused(tmp_path / "a", safetensors.torch.save({"x": torch.ones(2)}, metadata=metadata))
    assert "without calib metadata (a model's weights?)" in line


# ---- cut, or changed by a byte


def test_truncated_at_many_lengths(tmp_path, good):
    (length,) = struct.unpack("<Q", good[:8])
    sizes = {1, 7, 8, 9, 10, 100, length, length + 7, length + 8, length + 9, len(good) - 1}
    sizes |= set(range(0, len(good), 173)) - {0}
    for size in sorted(sizes):
        assert "truncated" in refused(tmp_path / "a", good[:size]), size


def test_appended(tmp_path, good):
    assert "something was appended" in refused(tmp_path / "a", good + b"\0")


@pytest.mark.full
def test_every_flipped_byte_is_noticed(tmp_path, good):
    """A sample of positions all over the file and each of the first and last 64 bytes."""
    positions = sorted({*range(64), *range(len(good) - 64, len(good)), *range(64, len(good) - 64, 19)})
    for position in positions:
        changed = bytearray(good)
        changed[position] ^= 0x15
        refused(tmp_path / "a", bytes(changed))
    assert len(positions) > 300


def test_a_flipped_byte_of_a_tensor_names_the_tensor(tmp_path, good):
    header, body = split(good)
    start, _ = header["values.scale"]["data_offsets"]
    position = len(good) - len(body) + start
    changed = bytearray(good)
    changed[position] ^= 1
    line = refused(tmp_path / "a", bytes(changed))
    assert "tensor 'values.scale' has sha256" in line
    assert "changed after the file was written" in line


def test_tampered_provenance(tmp_path, good):
    assert b'\\"seed\\":7' in good
    line = refused(tmp_path / "a", good.replace(b'\\"seed\\":7', b'\\"seed\\":8'))
    assert "the metadata has sha256" in line


def test_swapped_tensors(tmp_path, good):
    header, body = split(good)
    one, two = header["keys.low"], header["keys.high"]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    assert "has sha256" in refused(tmp_path / "a", join(header, body))
