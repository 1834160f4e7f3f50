"""Artifacts with wrong contents (metadata, fingerprint, tensors): each raises an `ArtifactError` of one line, no other
exception."""

import pytest
import torch
from forged_artifact import forged, forged_tensor, join, refused, split
from toy_artifact import toy_artifact, toy_tensors

from calib.runtime.artifact.artifact import Artifact, ArtifactError


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a"
    toy_artifact().save(path)
    return path.read_bytes()


# ---- the metadata


@pytest.mark.parametrize("version", ["2", "1.0", "", " 1"])
def test_wrong_version(tmp_path, good, version):
    header, body = split(good)
    header["__metadata__"]["format_version"] = version
    assert f"found format_version {version!r}, expected '1'" in refused(tmp_path / "a", join(header, body))


def test_missing_version(tmp_path, good):
    header, body = split(good)
    del header["__metadata__"]["format_version"]
    assert "found no format_version, expected '1'" in refused(tmp_path / "a", join(header, body))


def test_missing_or_extra_metadata_key(tmp_path, good):
    header, body = split(good)
    assert "metadata keys" in refused(tmp_path / "a", join({**header, "__metadata__": {"format_version": "1"}}, body))
    header["__metadata__"]["written"] = "today"
    assert "metadata keys" in refused(tmp_path / "a", join(header, body))


@pytest.mark.parametrize("text", ["", "{", "not json", "NaN", '{"a": NaN}', "[" * 200_000, '{"a": 1e999}', 5])
def test_metadata_that_is_not_json(tmp_path, good, text):
    header, body = split(good)
    header["__metadata__"]["calib"] = text
    line = refused(tmp_path / "a", join(header, body))
    assert "is not JSON" in line or "the metadata 'calib' holds" in line


@pytest.mark.parametrize("text", ["[]", "null", "7", '"text"', "{}", '{"tensors": {}}'])
def test_metadata_of_another_shape(tmp_path, good, text):
    header, body = split(good)
    header["__metadata__"]["calib"] = text
    assert "the metadata 'calib' holds" in refused(tmp_path / "a", join(header, body))


@pytest.mark.parametrize("field", ["clip_bits", "fingerprint", "provenance", "tensors"])
def test_a_missing_or_mistyped_field(tmp_path, good, field):
    assert "expected the fields" in refused(tmp_path / "a", forged(good, lambda document: document.pop(field)))
    line = refused(tmp_path / "a", forged(good, lambda document: document.update({field: "text"})))
    assert f"the metadata field '{field}' is a str" in line


@pytest.mark.parametrize(
    "field",
    [
        "architecture",
        "layers",
        "kv_heads",
        "head_dim",
        "heads",
        "vocab_size",
        "rope",
        "config",
        "config_hash",
        "weights",
    ],
)
def test_a_fingerprint_without_a_field(tmp_path, good, field):
    line = refused(tmp_path / "a", forged(good, lambda document: document["fingerprint"].pop(field)))
    assert f"the fingerprint has no field '{field}'" in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", "2"),
        ("heads", 0),
        ("kv_heads", -1),
        ("head_dim", True),
        ("vocab_size", None),
        ("weights", {}),
        ("weights", {"float32": 1, "float16": 2, "bfloat16": 3}),
        ("rope", "default"),
        ("config", {}),
        ("architecture", 5),
    ],
)
def test_a_fingerprint_with_a_malformed_field(tmp_path, good, field, value):
    line = refused(tmp_path / "a", forged(good, lambda document: document["fingerprint"].update({field: value})))
    assert field in line


@pytest.mark.parametrize(
    "bits", [[0, 1, 2, 3], [1, 2, 3, 17], [4, 3, 2, 1], [1, 1, 2, 3], ["1", "2", "3", "4"], [1.0, 2, 3, 4]]
)
def test_malformed_clip_bits(tmp_path, good, bits):
    line = refused(tmp_path / "a", forged(good, lambda document: document.update(clip_bits=bits)))
    assert "clip_bits is" in line


def test_deeply_nested_provenance(tmp_path, good):
    nested: object = 1
    for _ in range(100):
        nested = [nested]
    line = refused(tmp_path / "a", forged(good, lambda document: document.update(provenance={"a": nested})))
    assert "nested deeper than" in line


# ---- the tensors


def test_missing_tensor(tmp_path, good):
    extra = {"dtype": "F32", "shape": [2], "sha256": "0" * 64}
    line = refused(tmp_path / "a", forged(good, lambda document: document["tensors"].update(ghost=extra)))
    assert "tensor 'ghost' is missing from the file" in line


def test_extra_tensor(tmp_path, good):
    line = refused(tmp_path / "a", forged(good, lambda document: document["tensors"].pop("keys.low")))
    assert "tensor 'keys.low' is in the file and not in its metadata" in line


@pytest.mark.parametrize(("field", "value"), [("shape", [2, 8, 2]), ("dtype", "I32"), ("shape", [32]), ("dtype", None)])
def test_another_shape_or_dtype_than_listed(tmp_path, good, field, value):
    header, body = split(good)
    header["keys.low"][field] = value
    assert f"tensor 'keys.low' has {field}" in refused(tmp_path / "a", join(header, body))


@pytest.mark.parametrize("entry", [None, 5, [], "F32", {}, {"dtype": "F32", "shape": [2, 2, 8]}])
def test_malformed_entries(tmp_path, good, entry):
    header, body = split(good)
    header["keys.low"] = entry
    assert "'keys.low'" in refused(tmp_path / "a", join(header, body))
    line = refused(tmp_path / "a", forged(good, lambda document: document["tensors"].update({"keys.low": entry})))
    assert "the metadata of tensor 'keys.low'" in line


@pytest.mark.parametrize("offsets", [[0, 3], [64, 0], [-4, 60], ["0", "64"], None, [0], [0, 10**12], [1, 129]])
def test_malformed_offsets(tmp_path, good, offsets):
    header, body = split(good)
    header["keys.low"]["data_offsets"] = offsets
    refused(tmp_path / "a", join(header, body))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["keys.low", "later.unknown"])
def test_nan_or_infinity(tmp_path, name, value):
    tensor = torch.zeros(2, 2, 8)
    tensor[1, 0, 3] = value
    line = refused(tmp_path / "a", forged_tensor(name, tensor))
    assert f"tensor '{name}' has 1 NaN or infinite entries of 32" in line
    with pytest.raises(ArtifactError, match="1 NaN or infinite"):  # and it is never written
        toy_artifact(tensors={name: tensor})


def test_a_forged_file_is_otherwise_good(tmp_path):
    """`forged_tensor` makes files that load, so the other tests' files are refused for their contents."""
    (tmp_path / "a").write_bytes(forged_tensor("keys.low", torch.zeros(2, 2, 8)))
    assert Artifact.load(tmp_path / "a").tensors.keys() == {"keys.low"}


def test_a_dtype_that_is_not_storable(tmp_path):
    line = refused(tmp_path / "a", forged_tensor("later", torch.zeros(2, dtype=torch.complex64)))
    assert "tensor 'later' has dtype 'C64', expected one of" in line
    with pytest.raises(ArtifactError, match=r"tensor 'later' is torch\.complex64"):
        toy_artifact(tensors={"later": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("keys.low", torch.zeros(2, 2, 4), "expected torch.float32 [2, 2, 8]"),
        ("keys.low", torch.zeros(2, 2, 8, dtype=torch.float16), "is torch.float16 [2, 2, 8]"),
        ("values.scale", torch.zeros(2, 2, 8), "expected 1e-12 to 256"),
        ("keys.balancer", -torch.ones(2, 2, 8), "expected 5.96046e-08 to 65504"),
        ("queries.mean_square", -torch.ones(2, 2, 8), "expected 0 to 4.29077e+09"),
        ("keys.clip.32x1", torch.ones(2, 2, 2), "expected torch.float32 [2, 2, 1]"),
        ("keys.clip.32x1", torch.full((2, 2, 1), 1.5), "expected 5.96046e-08 to 1"),
        ("keys.clip.32x1", torch.zeros(2, 2, 1), "expected 5.96046e-08 to 1"),
    ],
)
def test_a_registered_tensor_of_another_shape_or_with_impossible_values(tmp_path, name, tensor, message):
    line = refused(tmp_path / "a", forged_tensor(name, tensor))
    assert f"tensor '{name}'" in line
    assert message in line


def test_a_range_upside_down():
    tensors = toy_tensors()
    tensors["keys.low"][1, 0, 5] = 2.0
    with pytest.raises(ArtifactError, match=r"'keys\.low' is above 'keys\.high' at layer 1, head 0, channel 5"):
        toy_artifact(tensors=tensors)


def test_clip_tensors_without_bit_widths():
    with pytest.raises(ArtifactError, match="clip_bits is empty"):
        toy_artifact(clip_bits=())


# ---- what may be written


@pytest.mark.parametrize(
    ("provenance", "where"),
    [
        ({"metrics": {"layers": [{"error": float("nan")}]}}, r"provenance\.metrics\.layers\[0\]\.error is nan"),
        ({"seed": torch.tensor(7)}, r"provenance\.seed is a Tensor"),
        ({("a", "b"): 1}, r"provenance has the key \('a', 'b'\)"),
        ({"when": object()}, r"provenance\.when is a object"),
    ],
)
def test_provenance_that_json_cannot_hold_is_refused_by_name(provenance, where):
    with pytest.raises(ArtifactError, match=where):
        toy_artifact(provenance=provenance)


@pytest.mark.parametrize("name", ["", "__metadata__", 5])
def test_impossible_tensor_names(name):
    with pytest.raises(ArtifactError, match="a tensor is named"):
        toy_artifact(tensors={name: torch.zeros(2)})
