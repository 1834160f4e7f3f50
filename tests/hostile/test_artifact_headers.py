"""Malformed headers of artifacts: shapes that torch cannot hold, names and texts with control characters or of millions of
characters. Each is refused in one short printable line."""

import struct

import pytest
import torch
from forged_artifact import forged, join, refused, split
from toy_artifact import toy_artifact, toy_model

from calib.runtime.artifact.artifact import Artifact, ArtifactError
from calib.runtime.artifact.file import LARGEST_HEADER

ESCAPE = "\x1b]0;title\x07"
LONG = "x" * 2_000_000
LONGEST_LINE = 400  # characters after the path


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a"
    toy_artifact().save(path)
    return path.read_bytes()


def short(path, data: bytes) -> str:
    """Assert that a file is refused, in a printable line of at most `LONGEST_LINE` characters after the path; return the line."""
    line = refused(path, data).removeprefix(f"{path}: ")
    assert line.isprintable() and len(line) <= LONGEST_LINE, line[:1000]
    return line


def in_both(data: bytes, name: str, **fields) -> bytes:
    """The file with a tensor's entry changed in the header and in the metadata, and a correct checksum."""
    data = forged(data, lambda document: document["tensors"][name].update(fields))
    header, body = split(data)
    header[name].update(fields)
    return join(header, body)


@pytest.mark.parametrize(
    "shape",
    [
        [1] * 9,
        [1] * 65,
        [1] * 1000,
        [-1, -32],
        [-32],
        [2**63],
        [2**63, 0],
        [0, 2**200],
        [2.0, 2, 8],
        [True, 32],
        "32",
        None,
        [[2]],
    ],
    ids=lambda shape: repr(shape)[:20],
)
def test_shapes_that_torch_cannot_hold(tmp_path, good, shape):
    line = short(tmp_path / "a", in_both(good, "keys.low", shape=shape))
    assert "tensor 'keys.low' has shape" in line and "expected at most 8 whole numbers" in line


@pytest.mark.parametrize("shape", [[2, 2, 9], [2**62, 2, 8], [0], []])
def test_shapes_that_are_not_as_many_bytes(tmp_path, good, shape):
    assert "bytes, as its shape" in short(tmp_path / "a", in_both(good, "keys.low", shape=shape))


@pytest.mark.parametrize("text", [ESCAPE, LONG], ids=["escape", "long"])
def test_texts_of_the_file_in_messages(tmp_path, good, text):
    header, body = split(good)
    version = {**header, "__metadata__": {**header["__metadata__"], "format_version": text}}
    more = {**header, "__metadata__": {**header["__metadata__"], text: "1"}}
    cases = {
        "format_version": join(version, body),
        "metadata keys": join(more, body),
        "has dtype": in_both(good, "keys.low", dtype=text),
        "'checkerboard'": in_both(good, "keys.low", checkerboard=text),
        "the fields": forged(good, lambda document: document.update({text: 1})),
        "has sha256": forged(good, lambda document: document["tensors"]["keys.low"].update(sha256=text)),
        "missing from the file": forged(good, lambda document: document["tensors"].update({text: {}})),
        "clip_bits is": forged(good, lambda document: document.update(clip_bits=[text])),
        "'heads' is": forged(good, lambda document: document["fingerprint"].update(heads=text)),
        "weights are malformed": forged(good, lambda document: document["fingerprint"]["weights"].update(float32=text)),
        "Infinity is not JSON": forged(good, lambda document: document.update(provenance={text: {text: [1e400]}})),
    }
    for said, data in cases.items():
        line = short(tmp_path / "a", data)
        assert said in line, said


@pytest.mark.parametrize("name", ["later\x1b[31m", "a\nb", "\ud800", "", "x" * 257])
def test_names_that_no_tensor_can_have(tmp_path, good, name):
    header, body = split(good)
    header[name] = header.pop("later.indices")

    def rename(document):
        document["tensors"][name] = document["tensors"].pop("later.indices")

    renamed = forged(join(header, body), rename)
    assert "a tensor is named" in short(tmp_path / "a", renamed)
    with pytest.raises(ArtifactError, match="a tensor is named"):
        toy_artifact(tensors={name: torch.zeros(2)})


@pytest.mark.parametrize("field", ["architecture", "rope", "config"])
@pytest.mark.parametrize("text", [ESCAPE, LONG], ids=["escape", "long"])
def test_a_comparison_of_models_is_short(tmp_path, good, field, text):
    from calib.runtime.files import canonical_json

    def change(document):
        own = document["fingerprint"]
        own[field] = text if field == "architecture" else {**own[field], text: text}
        own["config_hash"] = canonical_json.sha256(own["config"])

    (tmp_path / "a").write_bytes(forged(good, change))
    with pytest.raises(ArtifactError, match="differs: this model has") as caught:
        Artifact.load(tmp_path / "a").check(toy_model())
    assert str(caught.value).isprintable() and len(str(caught.value)) <= LONGEST_LINE


@pytest.mark.parametrize("number", [2**31, 10**4000])
def test_numbers_of_a_model_that_none_has(tmp_path, good, number):
    data = forged(good, lambda document: document["fingerprint"].update(layers=number))
    assert "expected a whole number from 1 to 4096" in short(tmp_path / "a", data)


@pytest.mark.full
def test_too_many_tensors(tmp_path, good):
    header, body = split(good)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header |= {f"later.{number}": entry for number in range(5000)}

    def list_them(document):
        empty = {"dtype": "F32", "shape": [0], "sha256": "0" * 64}
        document["tensors"] |= {f"later.{number}": empty for number in range(5000)}

    assert "expected at most 4096" in short(tmp_path / "a", forged(join(header, body), list_them))


def test_a_header_is_read_before_the_tensors_are(tmp_path, monkeypatch):
    """A model's weights, named by mistake, are refused after their header, without reading gigabytes."""
    from calib.runtime.artifact import file as artifact_file

    read = []

    class Watched:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, size: int = -1) -> bytes:
            read.append(size)
            return self.data[: size if size >= 0 else None]

    header = join({"x": {"dtype": "U8", "shape": [10**12], "data_offsets": [0, 10**12]}}, b"")
    with pytest.raises(ArtifactError, match="a model's weights"):
        artifact_file.decode(Watched(header), len(header) + 10**12)
    assert read == [8 + LARGEST_HEADER]


def test_a_header_longer_than_is_read(tmp_path):
    data = struct.pack("<Q", LARGEST_HEADER + 8) + b"{" + b" " * (LARGEST_HEADER + 8)
    assert f"expected at most {LARGEST_HEADER}" in short(tmp_path / "a", data)
    with pytest.raises(ArtifactError, match="shorten the provenance"):  # and it is never written
        toy_artifact(provenance={"note": "x" * LARGEST_HEADER}).save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_long_key_over_many_entries_takes_no_time(tmp_path, good):
    """Building the whole path of every entry would copy the long key for each of 200,000 entries."""
    from time_limit import time_limit

    data = forged(good, lambda document: document.update(provenance={LONG: list(range(200_000))}))
    (tmp_path / "a").write_bytes(data)
    with time_limit(20):
        assert Artifact.load(tmp_path / "a").provenance
